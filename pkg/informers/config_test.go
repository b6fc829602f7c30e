// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

func TestConfigNamespacesAreUniqueNames(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want []string
		err  string
	}{
		"without the flag, all namespaces":                {nil, nil, ""},
		"several namespaces in one flag":                  {[]string{"--namespaces=a,b-1"}, []string{"a", "b-1"}, ""},
		"several flags add up":                            {[]string{"--namespaces=a", "--namespaces=b"}, []string{"a", "b"}, ""},
		"a name that no namespace can have":               {[]string{"--namespaces=a,B_c"}, nil, `--namespaces: "B_c": `},
		"an empty name, which would mean all namespaces":  {[]string{"--namespaces=a,"}, nil, `--namespaces: "": `},
		"a variable that the environment has not":         {[]string{"--namespaces=$(POD_NAMESPACE)"}, nil, `--namespaces: "$(POD_NAMESPACE)": `},
		"a name that is too long":                         {[]string{"--namespaces=" + strings.Repeat("a", 64)}, nil, "must be no more than 63"},
		"a name twice, whose objects would be seen twice": {[]string{"--namespaces=a,b,a"}, nil, `--namespaces: "a" is named twice`},
	} {
		t.Run(name, func(t *testing.T) {
			c := NewConfig()
			fs := pflag.NewFlagSet("test", pflag.ContinueOnError)
			c.AddFlags(fs)
			if err := fs.Parse(tc.args); err != nil {
				t.Fatal(err)
			}
			err := c.Validate()
			if tc.err != "" {
				if err == nil || !strings.Contains(err.Error(), tc.err) {
					t.Errorf("error %v, want %q", err, tc.err)
				}
				return
			}
			if err != nil || !slices.Equal(c.Namespaces, tc.want) {
				t.Errorf("got %q, %v", c.Namespaces, err)
			}
		})
	}
}
