// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

var (
	parts          = regexp.MustCompile(`([0-9.]+)([a-z\x{b5}\x{3bc}]+)`)
	grammar        = regexp.MustCompile(`^[+-]?(0|(([0-9]+(\.[0-9]*)?|\.[0-9]+)(w|d|h|m|s|ms|us|\x{b5}s|\x{3bc}s|ns))+)$`)
	janitorGrammar = regexp.MustCompile(`^[0-9]+[smhdw]$`)
	janitorTimes   = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}(T[0-9]{2}:[0-9]{2}(:[0-9]{2}Z)?)?$`)
)

// sum returns the nanoseconds of a duration in the grammar, without its sign.
func sum(s string) (ns float64) {
	units := map[string]float64{"w": 6048e11, "d": 864e11, "h": 36e11, "m": 6e10, "s": 1e9, "ms": 1e6, "us": 1e3, "\u00b5s": 1e3, "\u03bcs": 1e3, "ns": 1}
	for _, part := range parts.FindAllStringSubmatch(s, -1) {
		n, _ := strconv.ParseFloat(part[1], 64)
		ns += n * units[part[2]]
	}
	return ns
}

// FuzzParse holds the parsers against the grammars, against each other and against Go's.
func FuzzParse(f *testing.F) {
	for s := range durations {
		f.Add(s)
	}
	for _, s := range noDurations {
		f.Add(s)
	}
	for _, s := range []string{"2030-01-10", "2030-01-10T11:59", "2030-01-10T11:59:00Z", "2030-01-10T11:59:00.5+02:00", "7d", "1x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		d, err := ParseDuration(s)
		if valid := grammar.MatchString(s); err == nil && !valid || valid && err != nil && sum(s) < 0.999*(1<<63) {
			t.Fatalf("%q: %v, %v; in the grammar: %t", s, d, err, valid)
		}
		if err == nil && math.Abs(math.Abs(float64(d))-sum(s)) > 1e-9*sum(s)+1e3*float64(len(s)) {
			t.Fatalf("%q: %v, but it is %v ns", s, d, sum(s))
		}
		if want, goErr := time.ParseDuration(s); !strings.ContainsAny(s, "dw") && (goErr == nil) != (err == nil) && want != -1<<63 {
			t.Fatalf("%q: %v, but Go has %v", s, err, goErr)
		} else if goErr == nil && err == nil && (d-want).Abs() > time.Microsecond {
			t.Fatalf("%q: %v, but Go has %v", s, d, want)
		}
		j, jerr := ParseJanitorTTL(s)
		if valid := janitorGrammar.MatchString(s); (jerr == nil) != (valid && err == nil) || jerr == nil && j != d {
			t.Fatalf("%q: %v, %v as the janitor's, %v, %v as a duration", s, j, jerr, d, err)
		}
		at, err := ParseJanitorExpires(s)
		if err == nil && (!janitorTimes.MatchString(s) || at.Location() != time.UTC) {
			t.Fatalf("%q: %v", s, at)
		}
		native, nativeErr := ParseExpires(s)
		if err == nil && (nativeErr != nil || !native.Equal(at)) {
			t.Fatalf("%q: %v is the janitor's, but %v, %v", s, at, native, nativeErr)
		}
		if err != nil && nativeErr == nil {
			if rfc, err := time.Parse(time.RFC3339, s); err != nil || !rfc.Equal(native) {
				t.Fatalf("%q: %v, %v", s, rfc, err)
			}
		}
		o := defaults()
		for _, a := range annotations { // no value panics, and none is due that its own parser refuses
			obj := &metav1.ObjectMeta{Namespace: "shop", CreationTimestamp: metav1.Time{Time: created}, Annotations: map[string]string{a.key: s, TTLControllerRefreshed: s}}
			if decided := o.Decide(typeOf("Pod"), obj, now); decided.Due(now) && len(decided.Problems) > 0 {
				t.Fatalf("%s: %q is due with %v", a.key, s, decided.Problems)
			}
		}
	})
}
