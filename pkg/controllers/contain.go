// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
)

// Contain calls f, a function of a controller. If f panics, it returns the panic as an error, with
// the stack. So it does if the error that f returns panics when it is asked for its text, such as a
// nil pointer in an error. The error returned is only text: no method of the controller's error is
// called later, outside of Contain.
func Contain(f func() error) (stack []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			stack, err = debug.Stack(), panicked(r)
		}
	}()
	if err := f(); err != nil {
		return nil, errors.New(err.Error())
	}
	return nil, nil
}

// panicked returns an error for what recover returned. Only the runtime's own errors are sure to
// contain nothing of an object, which may be a Secret. Of other values the error says the type.
func panicked(recovered any) error {
	if err, ok := recovered.(runtime.Error); ok {
		return fmt.Errorf("panic: %s", err.Error())
	}
	return fmt.Errorf("panic: a value of type %T", recovered)
}
