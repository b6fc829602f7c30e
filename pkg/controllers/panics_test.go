// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// problem is an error whose methods panic on a nil pointer.
type problem struct{ text string }

func (p *problem) Error() string    { return p.text }
func (p *problem) NotLeading() bool { return p.text == "" }

func TestContain(t *testing.T) {
	const nilPointer = "panic: runtime error: invalid memory address or nil pointer dereference"
	for name, tc := range map[string]struct {
		f     func() error
		want  string // the error's text; "" for none
		panic bool
	}{
		"success is no error": {f: func() error { return nil }},
		"an error keeps its text": {
			f: func() error { return &problem{"out of luck"} }, want: "out of luck",
		},
		"a nil pointer in an error is a panic": {
			f: func() error { var p *problem; return p }, want: nilPointer, panic: true,
		},
		"a nil pointer that an error wraps is a panic": {
			f: func() error { var p *problem; return errors.Join(p) }, want: nilPointer, panic: true,
		},
		"a panic of the runtime shows its text": {
			f: func() error { var p *problem; p.text = "x"; return nil }, want: nilPointer, panic: true,
		},
		"of a string that panics only the type shows": {
			f: func() error { panic("hunter2") }, want: "panic: a value of type string", panic: true,
		},
		"of an error that panics only the type shows": {
			f: func() error { panic(errors.New("hunter2")) }, want: "panic: a value of type *errors.errorString", panic: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			stack, err := informers.RecoverPanic(tc.f)
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

func TestContainNilPointerReturnedAsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		calls := 0
		h := newHarness(t, reconciling{
			Reconcile: func(context.Context, cache.ObjectName) (time.Duration, error) {
				if calls++; calls == 1 {
					var p *problem
					return 0, p
				}
				return 0, nil
			},
		}, "bad")
		h.run(t)
		pass(time.Minute)
		if got := h.loop.Status(); calls != 2 || got.Panics != 1 || got.Errors != 0 || !strings.Contains(got.LastError.Text, "nil pointer") {
			t.Errorf("%d calls, status %+v; want a panic, and the key tried again", calls, got)
		}
	})
}
