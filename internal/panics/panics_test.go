// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package panics

import (
	"errors"
	"strings"
	"testing"
)

// nilError is an error whose method panics on a nil pointer.
type nilError struct{ text string }

func (e *nilError) Error() string { return e.text }

func TestRecoverReturnsThePanicAsAnError(t *testing.T) {
	const nilPointer = "panic: runtime error: invalid memory address or nil pointer dereference"
	for name, tc := range map[string]struct {
		f     func() error
		want  string // the error's text; "" for none
		panic bool
	}{
		"success is no error":                          {func() error { return nil }, "", false},
		"an error keeps its text":                      {func() error { return &nilError{"out of luck"} }, "out of luck", false},
		"a nil pointer in an error is a panic":         {func() error { var p *nilError; return p }, nilPointer, true},
		"a nil pointer that an error wraps is a panic": {func() error { var p *nilError; return errors.Join(p) }, nilPointer, true},
		"a panic of the runtime shows its text":        {func() error { var p *nilError; p.text = "x"; return nil }, nilPointer, true},
		"a panic with a string shows only its type":    {func() error { panic("hunter2") }, "panic: a value of type string", true},
		"a panic with an error shows only its type":    {func() error { panic(errors.New("hunter2")) }, "panic: a value of type *errors.errorString", true},
	} {
		t.Run(name, func(t *testing.T) {
			stack, err := Recover(tc.f)
			got := ""
			if err != nil {
				got = err.Error()
			}
			if got != tc.want || (stack != nil) != tc.panic {
				t.Errorf("error %q with a stack: %v; want %q, %v", got, stack != nil, tc.want, tc.panic)
			}
			if tc.panic && !strings.Contains(string(stack), "panics_test.go") || strings.Contains(string(stack), "hunter2") {
				t.Errorf("stack:\n%s", stack)
			}
		})
	}
}
