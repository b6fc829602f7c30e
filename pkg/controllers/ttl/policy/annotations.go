// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"time"
)

// Family is a set of annotations that belong together.
type Family string

// The families.
const (
	Native  Family = "native"
	Twin    Family = "twin"
	Janitor Family = "janitor"
)

// Families are all of them.
var Families = []Family{Native, Twin, Janitor}

// The annotations.
const (
	NativeTTL     = "quartermaster.dev/ttl"
	NativeExpires = "quartermaster.dev/expires"
	TwinTTL       = "k8s-ttl-controller.twin.sh/ttl"
	// TwinRefreshed moves the start of TwinTTL. Alone it does nothing.
	TwinRefreshed  = "k8s-ttl-controller.twin.sh/refreshed-at"
	JanitorTTL     = "janitor/ttl"
	JanitorExpires = "janitor/expires"
)

// forever is the value of an annotation that never lets an object expire.
const forever = "forever"

// annotation is one that gives a deadline.
type annotation struct {
	family Family
	key    string
	// deadline returns when the object expires. The zero time is never.
	deadline func(value string, o *Object) (time.Time, error)
}

var annotations = []annotation{
	{Native, NativeTTL, func(value string, o *Object) (time.Time, error) {
		if value = strings.TrimSpace(value); value == forever {
			return time.Time{}, nil
		}
		return after(o.Created, value, ParseDuration)
	}},
	{Native, NativeExpires, func(value string, _ *Object) (time.Time, error) { return ParseExpires(strings.TrimSpace(value)) }},
	{Twin, TwinTTL, func(value string, o *Object) (time.Time, error) {
		start := o.Created
		if refreshed, ok := o.Annotations[TwinRefreshed]; ok {
			if err := start.UnmarshalText([]byte(refreshed)); err != nil {
				return start, fmt.Errorf("%s: %q is not a time in RFC 3339", TwinRefreshed, refreshed)
			}
		}
		return after(start, value, ParseDuration)
	}},
	{Janitor, JanitorTTL, func(value string, o *Object) (time.Time, error) {
		if value == forever {
			return time.Time{}, nil
		}
		return after(o.Created, value, ParseJanitorTTL)
	}},
	{Janitor, JanitorExpires, func(value string, _ *Object) (time.Time, error) { return ParseJanitorExpires(value) }},
}

// Keys returns the annotations of the families, those included that give no deadline alone.
func Keys(families []Family) (keys []string) {
	for _, a := range annotations {
		if slices.Contains(families, a.family) {
			keys = append(keys, a.key)
		}
	}
	if slices.Contains(families, Twin) {
		keys = append(keys, TwinRefreshed)
	}
	return keys
}

func after(start time.Time, value string, parse func(string) (time.Duration, error)) (time.Time, error) {
	d, err := parse(value)
	switch {
	case err != nil:
		return time.Time{}, err
	case d < 0:
		return time.Time{}, errors.New("is negative")
	case start.IsZero():
		return time.Time{}, errors.New("counts from the object's creationTimestamp, which it lacks")
	}
	return start.Add(d), nil
}

var errDuration = errors.New("is not a duration such as 90m, 36h or 1w2d")

var units = map[string]uint64{
	"w": 7 * 24 * uint64(time.Hour), "d": 24 * uint64(time.Hour), "h": uint64(time.Hour), "m": uint64(time.Minute), "s": uint64(time.Second),
	"ms": uint64(time.Millisecond), "us": uint64(time.Microsecond), "\u00b5s": uint64(time.Microsecond), "\u03bcs": uint64(time.Microsecond), "ns": 1,
}

// ParseDuration parses a duration of k8s-ttl-controller: an optional sign, then 0 or one or more of number and unit,
// which add up. Fractions of a nanosecond are cut off.
func ParseDuration(s string) (time.Duration, error) {
	rest := strings.TrimPrefix(s, "-")
	negative := rest != s
	if !negative {
		rest = strings.TrimPrefix(s, "+")
	}
	if rest == "0" {
		return 0, nil
	}
	var sum uint64
	for first := true; first || rest != ""; first = false {
		part, after, err := parsePart(rest)
		if err != nil {
			return 0, err
		}
		if sum += part; sum > math.MaxInt64 {
			return 0, errTooLong
		}
		rest = after
	}
	if negative {
		return -time.Duration(sum), nil
	}
	return time.Duration(sum), nil
}

var errTooLong = errors.New("is longer than 292 years")

// parsePart parses a number and its unit, and returns what follows.
func parsePart(s string) (nanoseconds uint64, rest string, err error) {
	whole, rest := digits(s)
	fraction, dot := "", strings.HasPrefix(rest, ".")
	if dot {
		fraction, rest = digits(rest[1:])
	}
	end := strings.IndexAny(rest, "0123456789.")
	if end < 0 {
		end = len(rest)
	}
	unit, ok := units[rest[:end]]
	if !ok || whole == "" && fraction == "" {
		return 0, "", errDuration
	}
	var n uint64
	for _, d := range []byte(whole) {
		if n = 10*n + uint64(d-'0'); n > math.MaxInt64/unit {
			return 0, "", errTooLong
		}
	}
	// 18 digits are more than the longest unit has nanoseconds.
	var numerator, denominator uint64 = 0, 1
	for _, d := range []byte(fraction[:min(len(fraction), 18)]) {
		numerator, denominator = 10*numerator+uint64(d-'0'), 10*denominator
	}
	high, low := bits.Mul64(numerator, unit)
	part, _ := bits.Div64(high, low, denominator)
	return n*unit + part, rest[end:], nil
}

func digits(s string) (number, rest string) {
	rest = strings.TrimLeft(s, "0123456789")
	return s[:len(s)-len(rest)], rest
}

var errJanitorTTL = errors.New(`is neither a number with one unit of s, m, h, d, w nor "forever"`)

// ParseJanitorTTL parses a TTL of kube-janitor other than forever: a number with one unit.
func ParseJanitorTTL(s string) (time.Duration, error) {
	number, unit := digits(s)
	if number == "" || !slices.Contains([]string{"s", "m", "h", "d", "w"}, unit) {
		return 0, errJanitorTTL
	}
	return ParseDuration(s)
}

// ParseExpires parses a time in RFC 3339, or of kube-janitor.
func ParseExpires(s string) (time.Time, error) {
	var t time.Time
	if t.UnmarshalText([]byte(s)) == nil {
		return notZero(t)
	}
	t, err := ParseJanitorExpires(s)
	if err != nil {
		return t, errors.New("is neither a time in RFC 3339 nor YYYY-MM-DDTHH:MM nor YYYY-MM-DD")
	}
	return t, nil
}

// ParseJanitorExpires parses a time of kube-janitor, which is in UTC.
func ParseJanitorExpires(s string) (time.Time, error) {
	for _, layout := range []string{"2006-01-02T15:04:05Z", "2006-01-02T15:04", time.DateOnly} {
		// Parse accepts more than the layout says, such as a fraction.
		if t, err := time.Parse(layout, s); err == nil && t.Format(layout) == s {
			return notZero(t)
		}
	}
	return time.Time{}, errors.New("is none of YYYY-MM-DDTHH:MM:SSZ, YYYY-MM-DDTHH:MM and YYYY-MM-DD")
}

// notZero keeps the first instant of the year 1 apart from never.
func notZero(t time.Time) (time.Time, error) {
	if t.IsZero() {
		return t.Add(1), nil
	}
	return t, nil
}
