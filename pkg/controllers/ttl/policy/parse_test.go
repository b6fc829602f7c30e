// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"
	"time"
)

var durations = map[string]time.Duration{
	"1h30m": 90 * time.Minute, "90m": 90 * time.Minute, "1.5h": 90 * time.Minute, "1w2d3h": (9*24 + 3) * time.Hour,
	"1d1d": 48 * time.Hour, "2d": 48 * time.Hour, ".5d1.5d": 48 * time.Hour, "2.d": 48 * time.Hour, "0": 0, "0s": 0, "+0": 0, "-0": 0, "+5m": 5 * time.Minute, "-5m": -5 * time.Minute,
	"1s20ns": time.Second + 20, "1\u00b5s": time.Microsecond, "1\u03bcs": time.Microsecond, "1us1ms": 1001 * time.Microsecond,
	"15250w": 15250 * 7 * 24 * time.Hour, "9223372036854775807ns": 1<<63 - 1, "0.12500000000000000000000001d": 3 * time.Hour,
}

var noDurations = []string{"", "5", "d", "1 h", " 1h", "1h ", "1H", "1D", "1mo", "1y", "15251w", "9223372036854775808ns", "15250w1w", "+", "-", ".", ".h",
	"--1h", "+-1h", "1.2.3h", "1h5", "00", "0.0", "forever", "1e3s", "99999999999999999999h", "\u0661h"}

func TestParseDuration(t *testing.T) {
	for s, want := range durations {
		if got, err := ParseDuration(s); err != nil || got != want {
			t.Errorf("%q: %v, %v; want %v", s, got, err, want)
		}
	}
	for _, s := range noDurations {
		if got, err := ParseDuration(s); err == nil {
			t.Errorf("%q: %v, want an error", s, got)
		}
	}
}

func TestParseTimes(t *testing.T) {
	for s, janitors := range map[string]bool{
		"2030-01-10": true, "2030-01-10T11:59": true, "2030-01-10T11:59:00Z": true, "2030-02-29": false, "2030-01-10T11:59:00.5Z": false,
		"2030-01-10T1:59": false, "2030-1-10": false, "2030-01-10 11:59": false, "2030-01-10T11:59Z": false, "2030-01-10T11:59:00+00:00": false, "": false, "forever": false,
	} {
		if _, err := ParseJanitorExpires(s); (err == nil) != janitors {
			t.Errorf("%q: %v", s, err)
		}
	}
	for s, valid := range map[string]bool{
		"2030-01-10T11:59:00.5Z": true, "2030-01-10T11:59:00+00:00": true, "2030-01-10": true, "2030-01-10T11:59": true,
		"2030-01-10T11:59:00": false, "tomorrow": false,
	} {
		if _, err := ParseExpires(s); (err == nil) != valid {
			t.Errorf("%q: %v", s, err)
		}
	}
}
