// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package panics contains the panics of controllers' functions.
package panics

import (
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"sync/atomic"
)

// Recover calls f, a function of a controller. If f panics, it returns the panic as an error, with the stack.
// It does the same if the Error method of f's error panics, such as for a nil pointer. The returned error is
// only text, so that no method of the controller's error is called outside of Recover.
func Recover(f func() error) (stack []byte, err error) {
	defer func() {
		if r := recover(); r != nil {
			raised := RaisedBy(r)
			stack, err = raised.Stack, panicError(raised.Value)
		}
	}()
	if err := f(); err != nil {
		return nil, errors.New(err.Error())
	}
	return nil, nil
}

// Raised is the value with which a goroutine passes on the panic of another goroutine. Recover returns the
// stack in it.
type Raised struct {
	Value any
	Stack []byte
}

// RaisedBy returns what recover has returned, with the stack of the goroutine that panicked first.
func RaisedBy(recovered any) Raised {
	if raised, again := recovered.(Raised); again {
		return raised
	}
	return Raised{recovered, debug.Stack()}
}

// Error implements error, for a panic that nothing recovers.
func (r Raised) Error() string { return fmt.Sprintf("%v\n\n%s", r.Value, r.Stack) }

// Mistake is what informers.For, and a function of the host that cannot return an error, panics with. The
// manager returns it as the error of the controller's entry.
type Mistake string

// Error implements error.
func (m Mistake) Error() string { return string(m) }

// RuntimeError makes a Mistake an error whose text is shown when a reconcile panics with it: the text names
// types and resources, and holds nothing of an object.
func (Mistake) RuntimeError() {}

// ShowValues lets the error of a panic show any value. The test kit sets it, since no object there is secret.
var ShowValues atomic.Bool

// panicError returns an error for what recover returned. Only the runtime's own errors are sure to contain
// nothing of an object, which may be a Secret. Of other values the error says the type.
func panicError(recovered any) error {
	if ShowValues.Load() {
		return fmt.Errorf("panic: %v", recovered)
	}
	if err, ok := recovered.(runtime.Error); ok {
		return fmt.Errorf("panic: %s", err.Error())
	}
	return fmt.Errorf("panic: a value of type %T", recovered)
}
