// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"slices"
	"strings"
)

// known lists the names of all controllers in the order of the registry.
func (o *Options) known() []string {
	names := make([]string, 0, len(o.entries))
	for _, e := range o.entries {
		names = append(names, e.Name)
	}
	return names
}

// enabled answers the entries that --controllers selects, in the order of the registry. As in kube-controller-manager,
// the first item that names a controller decides, and '*' stands for all that are on by default.
func (o *Options) enabled() ([]Entry, error) {
	var unknown []string
	for _, item := range o.Generic.Controllers {
		name := strings.TrimPrefix(item, "-")
		if item != "*" && !slices.ContainsFunc(o.entries, func(e Entry) bool { return e.is(name) }) {
			unknown = append(unknown, fmt.Sprintf("%q", item))
		}
	}
	if len(unknown) > 0 {
		return nil, fmt.Errorf("--controllers: %s is not a known controller; known are %s",
			strings.Join(unknown, ", "), strings.Join(o.known(), ", "))
	}

	var on []Entry
	for _, e := range o.entries {
		if e.selected(o.Generic.Controllers) {
			on = append(on, e)
		}
	}
	return on, nil
}

func (e Entry) is(name string) bool { return e.Name == name || slices.Contains(e.Aliases, name) }

func (e Entry) selected(items []string) bool {
	star := false
	for _, item := range items {
		switch {
		case item == "*":
			star = true
		case e.is(item):
			return true
		case strings.HasPrefix(item, "-") && e.is(item[1:]):
			return false
		}
	}
	return star && !e.OffByDefault
}
