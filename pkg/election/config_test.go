// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

func TestValidateRefusesUnsafeTimings(t *testing.T) {
	timings := func(lease, deadline, retry time.Duration) func(*Config) {
		return func(c *Config) {
			c.LeaseDuration = metav1.Duration{Duration: lease}
			c.RenewDeadline = metav1.Duration{Duration: deadline}
			c.RetryPeriod = metav1.Duration{Duration: retry}
		}
	}
	tests := map[string]struct {
		change func(*Config)
		want   []string // one for each error, in order
	}{
		"the defaults are valid":                          {func(*Config) {}, nil},
		"3s/2s/0.5s is valid":                             {timings(3*time.Second, 2*time.Second, 500*time.Millisecond), nil},
		"137s/107s/26s is valid":                          {timings(137*time.Second, 107*time.Second, 26*time.Second), nil},
		"the shortest safe lease is valid":                {timings(3*time.Second, 2690*time.Millisecond, time.Second), nil},
		"the wire carries whole seconds":                  {timings(3500*time.Millisecond, 2*time.Second, time.Second), []string{"--leader-elect-lease-duration: must be a whole number of seconds, which is all that the Lease can hold, got 3.5s"}},
		"a longer one would be taken for an edit":         {timings(601*time.Second, 2*time.Second, time.Second), []string{"--leader-elect-lease-duration: must be at most 10m0s, got 10m1s"}},
		"a Lease that cannot be told from a released one": {timings(time.Second, 600*time.Millisecond, 200*time.Millisecond), []string{"--leader-elect-lease-duration: must be at least 2s, got 1s"}},
		"a Lease of zero":                                 {timings(0, 2*time.Second, time.Second), []string{"--leader-elect-lease-duration: must be at least 2s, got 0s", "--leader-elect-renew-deadline: 2s needs"}},
		"no margin after the renew deadline":              {timings(3*time.Second, 2700*time.Millisecond, time.Second), []string{"--leader-elect-renew-deadline: 2.7s needs a --leader-elect-lease-duration of at least 4s"}},
		"a renew deadline of zero":                        {timings(3*time.Second, 0, time.Second), []string{"--leader-elect-renew-deadline: must be greater than 0, got 0s"}},
		"no time for a second renewal":                    {timings(15*time.Second, 10*time.Second, 6*time.Second), []string{"--leader-elect-retry-period: must be at most half of --leader-elect-renew-deadline (10s), got 6s"}},
		"a retry period that floods":                      {timings(15*time.Second, 10*time.Second, time.Millisecond), []string{"--leader-elect-retry-period: must be at least 100ms, got 1ms"}},
		"a lock type of old":                              {func(c *Config) { c.ResourceLock = "endpointsleases" }, []string{`--leader-elect-resource-lock: "endpointsleases" is not supported, use "leases"`}},
		"an unknown lock type":                            {func(c *Config) { c.ResourceLock = "zookeeper" }, []string{`--leader-elect-resource-lock: "zookeeper" is not supported, use "leases"`}},
		"a bad name":                                      {func(c *Config) { c.ResourceName = "A b" }, []string{"--leader-elect-resource-name"}},
		"a bad namespace":                                 {func(c *Config) { c.ResourceNamespace = "" }, []string{"--leader-elect-resource-namespace"}},
		"no time to drain":                                {func(c *Config) { c.DrainTimeout = 0 }, []string{"the time to drain"}},
		"all at once": {func(c *Config) {
			timings(1500*time.Millisecond, 20*time.Second, 15*time.Second)(c)
			c.ResourceLock = "configmaps"
		}, []string{"--leader-elect-resource-lock", "--leader-elect-lease-duration", "--leader-elect-renew-deadline", "--leader-elect-retry-period"}},
		"nothing matters when it is off": {func(c *Config) { *c = Config{} }, nil},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			cfg := testConfig()
			tc.change(&cfg)
			var got []string
			if err := cfg.Validate(); err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			if len(got) != len(tc.want) {
				t.Fatalf("got %d errors, want %d:\n%s", len(got), len(tc.want), strings.Join(got, "\n"))
			}
			for i := range got {
				if !strings.HasPrefix(got[i], tc.want[i]) {
					t.Errorf("got  %s\nwant %s...", got[i], tc.want[i])
				}
			}
		})
	}
}

func TestAddFlags(t *testing.T) {
	cfg := testConfig()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	cfg.AddFlags(fs)
	assert.NoError(t, fs.Parse([]string{"--leader-elect-lease-duration=3s", "--leader-elect-resource-name=other", "--leader-elect=false"}))
	want := testConfig()
	want.LeaseDuration.Duration, want.ResourceName, want.LeaderElect = 3*time.Second, "other", false
	assert.Equal(t, "configuration", want, cfg)
}

// TestHungRequestDoesNotEndTheTerm checks that one hanging request does not end the term.
func TestHungRequestDoesNotEndTheTerm(t *testing.T) {
	for _, t0 := range []protocol.Timing{
		{Lease: 15 * time.Second, Deadline: 10 * time.Second, Retry: 2 * time.Second},
		{Lease: 3 * time.Second, Deadline: 2 * time.Second, Retry: 500 * time.Millisecond},
		{Lease: 3 * time.Second, Deadline: 2 * time.Second, Retry: time.Second},
	} {
		if hung := t0.Retry + t0.RequestTimeout(); hung >= t0.Deadline || t0.RequestTimeout() <= 0 {
			t.Errorf("%+v: a renewal that hangs ends %s after the last one", t0, hung)
		}
	}
}
