// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"regexp"
	"strings"
	"testing"
	"time"
)

const (
	timePattern = `[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})`
	dayPattern  = `(?i:sun|mon|tue|wed|thu|fri|sat)`
	blank       = `[\s\v\x{85}\pZ]`
	hourPattern = `([0-9]|[01][0-9]|2[0-4])(:[0-5][0-9])?`
)

// grammar is the grammar of an item, written otherwise than the parser.
var grammar = regexp.MustCompile(`^((?i:always|true|never|false)|` +
	timePattern + blank + `*-` + blank + `*` + timePattern + `|(from|until)(` + blank + `+|-` + blank + `*)` + timePattern + `|` +
	`(` + dayPattern + `-` + dayPattern + blank + `+)?` + hourPattern + `-` + hourPattern + `(` + blank + `+[A-Z][A-Za-z0-9_+/-]*)?)$`)

// FuzzSpans holds the parser against the grammar, and what it parses against the clock.
func FuzzSpans(f *testing.F) {
	for _, value := range []string{
		"always", "Mon-Fri 07:30-20:30 Europe/Berlin", "Fri-Mon 20-8", "2026-11-25T08:00:00+01:00-2026-11-25T18:00:00.5Z", "from 2026-11-25T08:00:00Z",
		"until-2026-11-25T08:00:00Z, never", "24:00-00:00", "7-9 Australia/Lord_Howe,8-8", "8-18 PST", "from\t2026-11-25T08:00:00Z", "from 2026-11-25T8:00:00.0Z", "7:30-20:30",
	} {
		f.Add(value, int64(1774743300))
	}
	f.Fuzz(func(t *testing.T, value string, seconds int64) {
		spans, err := ParseSpans(value, everyDay)
		valid := true
		for item := range strings.SplitSeq(value, ",") {
			valid = valid && grammar.MatchString(strings.TrimSpace(item))
		}
		if err == nil && !valid {
			t.Fatalf("%q is %v", value, spans)
		}
		// Beyond the pattern are times that no calendar has, 24:30, unknown zones, and the bounds.
		if err != nil && valid && !strings.ContainsAny(value, "ABCDEFGHIJKLMNOPQRSTUVWXYZ4") && len(value) <= maxItem {
			t.Fatalf("%q: %v", value, err)
		}
		if err != nil {
			return
		}
		now := time.Unix(seconds%(1<<34), 0)
		for range 5 {
			inside, next := spans.Contains(now)
			if next.IsZero() {
				return
			}
			if !next.After(now) {
				t.Fatalf("%q at %v: the next boundary is %v", value, now, next)
			}
			if before, _ := spans.Contains(next.Add(-time.Nanosecond)); before != inside {
				t.Fatalf("%q: inside is %t at %v, but %t just before the next boundary, %v", value, inside, now, before, next)
			}
			now = next
		}
	})
}

// FuzzObject holds what the cache keeps against what it was made of.
func FuzzObject(f *testing.F) {
	f.Add("Mon-Fri 7-18 UTC", "3", "a", int64(3), true)
	f.Fuzz(func(t *testing.T, schedule, record, name string, number int64, withCompat bool) {
		annotations := map[string]string{"downscaler/uptime": schedule, "quartermaster.dev/scale-original-replicas": record}
		o := Object{Values: valuesOf(annotations, withCompat), Number: max(number, 0), ScaleTarget: name, Owned: withCompat}
		got := Decode(o.Encode())
		o.Created = got.Created // in seconds
		if got != o {
			t.Fatalf("%+v became %+v", o, got)
		}
		for _, kind := range []Kind{Deployment, CronJob, ScaledObject} {
			if n, err := got.record(kind); err == nil && (n < 0 || n > Unpaused) {
				t.Fatalf("%q is the record %d", record, n)
			}
		}
	})
}
