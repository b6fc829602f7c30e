// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package cluster

import "errors"

func withHostname(string, func() error) error {
	return errors.New("a second API server needs a host name of its own, and so Linux")
}
