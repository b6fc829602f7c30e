// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import "slices"

// enable returns errRestart unless entries are the controllers that were enabled at the start.
func (cs hostedControllers) enable(entries []Entry) error {
	if !slices.EqualFunc(cs, entries, func(c *hosted, e Entry) bool { return c.name == e.Name }) {
		return errRestart
	}
	return nil
}
