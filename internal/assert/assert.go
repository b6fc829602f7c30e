// Package assert has the checks that the tests of all packages share. Tests alone may import it.
package assert

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Equal fails the test if got differs from want, and goes on. What names the value that the test compares.
func Equal[T any](t testing.TB, what string, want, got T, options ...cmp.Option) {
	t.Helper()
	if diff := cmp.Diff(want, got, options...); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// NoError ends the test if there is an error.
func NoError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Must returns the value of a call that cannot fail. It panics if there is an error all the same.
func Must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}
