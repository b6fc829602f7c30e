// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package csrapprover

import (
	"hash/maphash"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

func TestMistakesNameTheirFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		flags string
		want  []string
	}{
		"the defaults, for a manager that does not run the controller": {"", nil},
		"a broken expression is refused":                               {"--csr-approver-dns-regex=(", []string{"--csr-approver-dns-regex"}},
		"a range that is no CIDR is refused":                           {"--csr-approver-ip-ranges=10.0.0.0/8,10.0.0.1", []string{"--csr-approver-ip-ranges"}},
		"a time that no signer gives":                                  {"--csr-approver-max-duration=8809h", []string{"--csr-approver-max-duration"}},
		"a negative limit and an expression":                           {"--csr-approver-dns-regex=( --csr-approver-max-approvals-per-node-per-hour=-1", []string{"--csr-approver-dns-regex", "--csr-approver-max-approvals-per-node-per-hour"}},
		"everything that is set on purpose":                            {"--csr-approver-ip-ranges=0.0.0.0/0,::/0 --csr-approver-dns-regex=.* --csr-approver-max-approvals-per-node-per-hour=0", nil},
		"an expression that ends in a newline":                         {"--csr-approver-dns-regex=a\n", nil},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := NewConfig()
			fs := pflag.NewFlagSet("", pflag.ContinueOnError)
			cfg.AddFlags(fs)
			assert.NoError(t, fs.Parse(strings.Split(tc.flags, " ")))
			var got []string
			if err := cfg.Validate(controllers.Settings{}); err != nil {
				for line := range strings.SplitSeq(err.Error(), "\n") {
					flag, _, _ := strings.Cut(line, ":")
					got = append(got, flag)
				}
			}
			assert.Equal(t, "configuration", tc.want, got)
		})
	}
}

// TestRangesAreRequired checks that the controller does not start without ranges.
func TestRangesAreRequired(t *testing.T) {
	_, err := newController(NewConfig(), maphash.MakeSeed(), nil, nil, nil, nil, controllers.LoopOptions{}, nil)
	if err == nil || !strings.HasPrefix(err.Error(), "--csr-approver-ip-ranges: ") {
		t.Error(err)
	}
}

// TestPermissionsAreForOneSigner holds that nothing else can be approved.
func TestPermissionsAreForOneSigner(t *testing.T) {
	ok := false
	for _, rule := range Entry().Permissions(controllers.Settings{}) {
		for _, verb := range rule.Verbs {
			if verb == "approve" {
				ok = true
				assert.Equal(t, "names of the rule", []string{"kubernetes.io/kubelet-serving"}, rule.ResourceNames)
			}
		}
	}
	if !ok {
		t.Error("no rule permits to approve")
	}
}
