package assert_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// failures is a test that takes down what fails it.
type failures struct {
	testing.TB
	errors, fatals []string
}

func (*failures) Helper() {}

func (f *failures) Errorf(format string, args ...any) {
	f.errors = append(f.errors, fmt.Sprintf(format, args...))
}

func (f *failures) Fatal(args ...any) { f.fatals = append(f.fatals, fmt.Sprint(args...)) }

func TestEqualFailsAndNoErrorEndsATest(t *testing.T) {
	f := &failures{TB: t}
	assert.Equal(f, "numbers", 1, 1)
	assert.NoError(f, nil)
	if len(f.errors)+len(f.fatals) != 0 {
		t.Errorf("failed without a reason: %q, %q", f.errors, f.fatals)
	}
	assert.Equal(f, "numbers", 1, 2)
	assert.NoError(f, errors.New("out of luck"))
	if len(f.errors) != 1 || len(f.fatals) != 1 || f.fatals[0] != "out of luck" {
		t.Errorf("failed with %q and ended with %q", f.errors, f.fatals)
	}
}
