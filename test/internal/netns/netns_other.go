// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

// Package netns runs tests in a network namespace, which only Linux has.
package netns

import "errors"

// ErrForbidden is always returned.
var ErrForbidden = errors.New("only Linux has network namespaces")

// Run returns ErrForbidden.
func Run(func() error, func() int) (int, error) { return 0, ErrForbidden }
