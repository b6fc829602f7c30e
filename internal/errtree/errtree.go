// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package errtree judges errors that wrap or join others. errors.As finds only the first error of a type in a
// tree, although the joined errors may say something else.
package errtree

import "slices"

// Every reports whether match holds for err or for an error that err wraps. If err joins errors, match must
// hold for err or for each of them.
func Every(err error, match func(error) bool) bool {
	parts := Parts(err)
	return match(err) || len(parts) > 0 && !slices.ContainsFunc(parts, func(err error) bool { return !Every(err, match) })
}

// Any reports whether match holds for err, or for an error that err wraps or joins.
func Any(err error, match func(error) bool) bool {
	return match(err) || slices.ContainsFunc(Parts(err), func(err error) bool { return Any(err, match) })
}

// Parts returns the errors that err wraps or joins.
func Parts(err error) []error {
	switch e := any(err).(type) {
	case interface{ Unwrap() error }:
		if wrapped := e.Unwrap(); wrapped != nil {
			return []error{wrapped}
		}
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	case interface{ Errors() []error }: // an Aggregate of apimachinery, which has no Unwrap
		return e.Errors()
	}
	return nil
}
