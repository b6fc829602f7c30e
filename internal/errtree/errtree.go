// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package errtree judges errors that wrap or join others. errors.As finds the first error of a type, whatever
// the others of that type say, and hides those that are joined with it.
package errtree

import "slices"

// Every reports whether is holds for err or for an error that err wraps. If err joins errors, is must hold
// for err or for each of them.
func Every(err error, is func(error) bool) bool {
	if is(err) {
		return true
	}
	switch e := any(err).(type) {
	case interface{ Unwrap() error }:
		return Every(e.Unwrap(), is)
	case interface{ Unwrap() []error }:
		joined := e.Unwrap()
		return len(joined) > 0 && !slices.ContainsFunc(joined, func(err error) bool { return !Every(err, is) })
	}
	return false
}

// Any reports whether is holds for err, or for an error that err wraps or joins.
func Any(err error, is func(error) bool) bool {
	if is(err) {
		return true
	}
	switch e := any(err).(type) {
	case interface{ Unwrap() error }:
		return Any(e.Unwrap(), is)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(e.Unwrap(), func(err error) bool { return Any(err, is) })
	}
	return false
}
