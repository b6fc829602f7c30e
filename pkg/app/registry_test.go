// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

func TestRegistryOrdersTheList(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"by default":               {nil, "extra off off does more"},
		"as the flags have it":     {[]string{"--controllers=extra"}, "extra off on does more"},
		"the registry's among all": {[]string{"--controllers=extra"}, "config-reload on off rolls workloads"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			cmd := NewCommand(With(withFunctions(controllers.Entry{Name: "extra", Summary: "does more", OffByDefault: true})))
			cmd.SetOut(&out)
			cmd.SetArgs(append([]string{"controllers"}, tc.args...))
			if err := cmd.Execute(); err != nil {
				t.Fatal(err)
			}
			if words := strings.Join(strings.Fields(out.String()), " "); !strings.Contains(words, tc.want) {
				t.Errorf("no %q in\n%s", tc.want, out.String())
			}
		})
	}
}
