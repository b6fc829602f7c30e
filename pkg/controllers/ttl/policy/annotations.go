// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Family is a set of annotations that belong together.
type Family string

// Families of annotations, by the operator that they come from.
const (
	Native        Family = "native"
	TTLController Family = "ttl-controller"
	Janitor       Family = "janitor"
)

// Families are all the families.
var Families = []Family{Native, TTLController, Janitor}

// Never is later than every deadline that an annotation can give.
var Never = time.Date(20000, 1, 1, 0, 0, 0, 0, time.UTC)

// Annotations of each family.
const (
	NativeTTL        = "quartermaster.dev/ttl"
	NativeExpires    = "quartermaster.dev/expires"
	TTLControllerTTL = "k8s-ttl-controller.twin.sh/ttl"
	// TTLControllerRefreshed moves the start of TTLControllerTTL. Alone it does nothing.
	TTLControllerRefreshed = "k8s-ttl-controller.twin.sh/refreshed-at"
	JanitorTTL             = "janitor/ttl"
	JanitorExpires         = "janitor/expires"
)

// MaxValue is how long the value of an annotation may be, in bytes. Every sensible time or duration is
// shorter. A longer value is invalid and is not parsed.
const MaxValue = 100

// forever is the value of an annotation that never lets an object expire.
const forever = "forever"

var errTooLong = fmt.Errorf("is longer than %d bytes", MaxValue)

// annotation is an annotation that gives a deadline.
type annotation struct {
	family Family
	key    string
	// deadline returns when the object expires.
	deadline func(value string, obj metav1.Object) (time.Time, error)
}

var annotations = []annotation{
	{Native, NativeTTL, func(value string, obj metav1.Object) (time.Time, error) {
		if value = strings.TrimSpace(value); value == forever {
			return Never, nil
		}
		return deadlineAfter(obj.GetCreationTimestamp().Time, value, ParseDuration)
	}},
	{Native, NativeExpires, func(value string, _ metav1.Object) (time.Time, error) { return ParseExpires(strings.TrimSpace(value)) }},
	{TTLController, TTLControllerTTL, func(value string, obj metav1.Object) (time.Time, error) {
		start := obj.GetCreationTimestamp().Time
		if refreshed, ok := obj.GetAnnotations()[TTLControllerRefreshed]; ok {
			if len(refreshed) > MaxValue {
				return start, fmt.Errorf("%s: %w", TTLControllerRefreshed, errTooLong)
			}
			if err := start.UnmarshalText([]byte(refreshed)); err != nil {
				return start, fmt.Errorf("%s: %q is not a time in RFC 3339", TTLControllerRefreshed, refreshed)
			}
		}
		return deadlineAfter(start, value, ParseDuration)
	}},
	{Janitor, JanitorTTL, func(value string, obj metav1.Object) (time.Time, error) {
		if value == forever {
			return Never, nil
		}
		return deadlineAfter(obj.GetCreationTimestamp().Time, value, ParseJanitorTTL)
	}},
	{Janitor, JanitorExpires, func(value string, _ metav1.Object) (time.Time, error) { return ParseJanitorExpires(value) }},
}

// Keys returns the annotations of the families that count, even if an annotation alone gives no deadline.
func (o *Options) Keys() (keys []string) {
	for _, a := range annotations {
		if slices.Contains(o.Families, a.family) {
			keys = append(keys, a.key)
		}
	}
	if slices.Contains(o.Families, TTLController) {
		keys = append(keys, TTLControllerRefreshed)
	}
	return keys
}

// Annotated reports whether an object has an annotation that counts and gives a deadline.
func (o *Options) Annotated(obj metav1.Object) bool {
	return slices.ContainsFunc(annotations, func(a annotation) bool {
		_, has := obj.GetAnnotations()[a.key]
		return has && slices.Contains(o.Families, a.family)
	})
}

// deadlineAfter returns the time that is a duration after start.
func deadlineAfter(start time.Time, value string, parse func(string) (time.Duration, error)) (time.Time, error) {
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

var errDuration = errors.New("is not a duration such as 90m, 36h or 1w2d, of less than 292 years")

var (
	durationPattern = regexp.MustCompile(`^[+-]?(0|([0-9.]+[a-z\x{b5}\x{3bc}]+)+)$`) // b5 and 3bc are both micro
	summandPattern  = regexp.MustCompile(`([0-9.]+)([a-z\x{b5}\x{3bc}]+)`)
)

// ParseDuration parses a duration of k8s-ttl-controller: an optional sign, then 0 or one or more of number
// and unit, which add up. The units are Go's, and d and w.
func ParseDuration(s string) (time.Duration, error) {
	if !durationPattern.MatchString(s) {
		return 0, errDuration
	}
	var sum int64 // nanoseconds
	for _, m := range summandPattern.FindAllStringSubmatch(s, -1) {
		number, unit, factor := m[1], m[2], int64(1)
		switch unit {
		case "d":
			unit, factor = "h", 24
		case "w":
			unit, factor = "h", 7*24
		}
		d, err := time.ParseDuration(number + unit)
		if err != nil || int64(d) > (math.MaxInt64-sum)/factor {
			return 0, errDuration
		}
		sum += factor * int64(d)
	}
	if strings.HasPrefix(s, "-") {
		sum = -sum
	}
	return time.Duration(sum), nil
}

var janitorTTLPattern = regexp.MustCompile(`^[0-9]+[smhdw]$`)

// ParseJanitorTTL parses a TTL of kube-janitor other than forever: a number with one unit.
func ParseJanitorTTL(s string) (time.Duration, error) {
	if !janitorTTLPattern.MatchString(s) {
		return 0, errors.New(`must be a number with one unit of s, m, h, d, w, or "forever"`)
	}
	return ParseDuration(s)
}

// ParseExpires parses a time in RFC 3339 or in kube-janitor's form.
func ParseExpires(s string) (t time.Time, err error) {
	if t.UnmarshalText([]byte(s)) == nil {
		return t, nil
	}
	if t, err = ParseJanitorExpires(s); err != nil {
		err = errors.New("must be a time in RFC 3339, YYYY-MM-DDTHH:MM or YYYY-MM-DD")
	}
	return t, err
}

// ParseJanitorExpires parses a time in kube-janitor's form, which is in UTC.
func ParseJanitorExpires(s string) (time.Time, error) {
	for _, layout := range []string{"2006-01-02T15:04:05Z", "2006-01-02T15:04", time.DateOnly} {
		// Parse accepts more than the layout says, such as a fraction.
		if t, err := time.Parse(layout, s); err == nil && t.Format(layout) == s {
			return t, nil
		}
	}
	return time.Time{}, errors.New("must be one of YYYY-MM-DDTHH:MM:SSZ, YYYY-MM-DDTHH:MM, YYYY-MM-DD")
}
