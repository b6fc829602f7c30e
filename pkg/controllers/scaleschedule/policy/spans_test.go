// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func mustTime(text string) time.Time {
	t, err := time.Parse(time.RFC3339, text)
	if err != nil {
		panic(err)
	}
	return t
}

var everyDay = Defaults{Days: ptrTo(Days(127)), Zone: time.UTC}

func ptrTo[T any](v T) *T { return &v }

// TestSpansContainTheirMoments has items of the grammar with moments inside and outside.
func TestSpansContainTheirMoments(t *testing.T) {
	for value, tc := range map[string]struct{ inside, outside []string }{
		"always":          {inside: []string{"2026-11-25T00:00:00Z"}},
		"TRUE":            {inside: []string{"2026-11-25T00:00:00Z"}},
		"never":           {outside: []string{"2026-11-25T00:00:00Z"}},
		"False":           {outside: []string{"2026-11-25T00:00:00Z"}},
		" never , always": {inside: []string{"2026-11-25T00:00:00Z"}},
		"2026-11-25T08:00:00+01:00-2026-11-25T18:00:00+01:00": {
			inside: []string{"2026-11-25T07:00:00Z", "2026-11-25T16:59:59Z"}, outside: []string{"2026-11-25T06:59:59Z", "2026-11-25T17:00:00Z"}},
		"2026-11-25T08:00:00-05:00 - 2026-11-25T18:00:00Z": {inside: []string{"2026-11-25T13:00:00Z"}, outside: []string{"2026-11-25T12:59:59Z"}},
		"from 2026-11-25T08:00:00Z":                        {inside: []string{"2026-11-25T08:00:00Z", "2999-01-01T00:00:00Z"}, outside: []string{"2026-11-25T07:59:59Z"}},
		"from-2026-11-25T08:00:00Z":                        {inside: []string{"2026-11-25T08:00:00Z"}},
		"until 2026-11-25T08:00:00.5Z":                     {inside: []string{"2026-11-25T08:00:00Z"}, outside: []string{"2026-11-25T08:00:01Z"}},
		"until-2026-11-25T08:00:00Z":                       {inside: []string{"2026-11-25T07:59:59Z"}, outside: []string{"2026-11-25T08:00:00Z"}},
		"2026-11-26T00:00:00Z-2026-11-25T00:00:00Z":        {outside: []string{"2026-11-25T12:00:00Z"}},
		// 25 November 2026 is a Wednesday.
		"Wed-Fri 07:30-20:30 Europe/Berlin": {inside: []string{"2026-11-25T06:30:00Z", "2026-11-25T19:29:59Z"}, outside: []string{"2026-11-25T06:29:59Z", "2026-11-25T19:30:00Z", "2026-11-24T12:00:00Z"}},
		"7:30-20:30":                        {inside: []string{"2026-11-25T07:30:00Z"}, outside: []string{"2026-11-25T07:29:59Z"}},
		"wED-fRI 8-18 UTC":                  {inside: []string{"2026-11-25T08:00:00Z"}, outside: []string{"2026-11-25T18:00:00Z"}},
		"Fri-Fri 8-18:30 UTC":               {inside: []string{"2026-11-27T18:29:00Z"}, outside: []string{"2026-11-26T12:00:00Z", "2026-11-28T12:00:00Z"}},
		"Sun-Fri 0-24 UTC":                  {inside: []string{"2026-11-29T00:00:00Z", "2026-11-27T23:59:59Z"}, outside: []string{"2026-11-28T00:00:00Z"}},
		"Fri-Mon 00:00-24:00 UTC":           {inside: []string{"2026-11-27T00:00:00Z", "2026-11-30T23:59:59Z"}, outside: []string{"2026-12-01T00:00:00Z", "2026-11-26T23:59:59Z"}},
		"7-9":                               {inside: []string{"2026-11-25T07:00:00Z"}},
		"7-9 Asia/Kathmandu":                {inside: []string{"2026-11-25T01:15:00Z"}, outside: []string{"2026-11-25T01:14:59Z"}},
		"Wed-Wed 7-9":                       {inside: []string{"2026-11-25T07:00:00Z"}, outside: []string{"2026-11-26T07:00:00Z"}},
		"Wed-Wed 20:00-08:00 UTC":           {inside: []string{"2026-11-25T00:00:00Z", "2026-11-25T07:59:59Z", "2026-11-25T20:00:00Z"}, outside: []string{"2026-11-25T08:00:00Z", "2026-11-26T00:00:00Z"}},
		"Wed-Wed 20:00-00:00 UTC":           {inside: []string{"2026-11-25T23:59:59Z"}, outside: []string{"2026-11-25T00:00:00Z", "2026-11-26T00:00:00Z"}},
		"03:00-03:00 UTC":                   {outside: []string{"2026-11-25T03:00:00Z", "2026-11-25T12:00:00Z"}},
		"0-0":                               {outside: []string{"2026-11-25T00:00:00Z", "2026-11-25T12:00:00Z"}},
		"24:00-00:00":                       {outside: []string{"2026-11-25T00:00:00Z", "2026-11-25T12:00:00Z"}},
		"24-8":                              {inside: []string{"2026-11-25T00:00:00Z"}, outside: []string{"2026-11-25T08:00:00Z", "2026-11-25T23:59:59Z"}},
		"Mon-Fri 08:00-12:00 UTC, Mon-Fri 14:00-18:00 UTC": {inside: []string{"2026-11-25T11:00:00Z", "2026-11-25T14:00:00Z"}, outside: []string{"2026-11-25T13:00:00Z"}},
		// A Friday and the Saturday after it.
		"Mon-Fri 20:00-08:00 UTC": {inside: []string{"2026-11-27T21:00:00Z"}, outside: []string{"2026-11-28T00:00:00Z", "2026-11-28T07:00:00Z"}},
		// Sunday in UTC is Monday in Auckland.
		"Mon-Fri 06:30-19:30 Pacific/Auckland": {inside: []string{"2026-11-29T20:00:00Z"}, outside: []string{"2026-11-27T20:00:00Z"}},
	} {
		spans, err := ParseSpans(value, everyDay)
		if err != nil {
			t.Errorf("%q: %v", value, err)
			continue
		}
		for want, times := range map[bool][]string{true: tc.inside, false: tc.outside} {
			for _, text := range times {
				if got, _ := spans.Contains(mustTime(text)); got != want {
					t.Errorf("%q at %s: inside is %t", value, text, got)
				}
			}
		}
	}
}

// TestSpansFollowSummerTime has boundaries in nights in which the clock changes.
func TestSpansFollowSummerTime(t *testing.T) {
	for name, tc := range map[string]struct{ item, night, want string }{
		"a span that is skipped":             {"02:15-02:45 Europe/Berlin", "2026-03-28", ""},
		"a span that is there twice":         {"02:15-02:45 Europe/Berlin", "2026-10-24", "00:15 00:45"},
		"a start that is skipped":            {"02:30-04:00 Europe/Berlin", "2026-03-28", "01:00 02:00"},
		"an end that is skipped":             {"01:30-02:30 Europe/Berlin", "2026-03-28", "00:30 01:00"},
		"an end that is there twice":         {"01:30-02:30 Europe/Berlin", "2026-10-24", "23:30 00:30"},
		"a start at the repeated hour":       {"02:00-03:00 Europe/Berlin", "2026-10-24", "00:00 02:00"},
		"a day that is 23 hours long":        {"0-24 Europe/Berlin", "2026-03-28", ""},
		"half an hour that is there twice":   {"01:45-02:15 Australia/Lord_Howe", "2026-04-04", "14:45 15:45"},
		"half an hour that is skipped":       {"02:00-02:30 Australia/Lord_Howe", "2026-10-03", ""},
		"a midnight that is skipped":         {"00:30-02:00 Africa/Cairo", "2026-04-23", "22:00 23:00"},
		"a last hour that is there twice":    {"23:30-24:00 Africa/Cairo", "2026-10-29", "20:30 22:00"},
		"a last hour, and what follows upon": {"23:30-00:30 Africa/Cairo", "2026-10-29", "20:30 22:30"},
	} {
		spans, err := ParseSpans(tc.item, everyDay)
		assert.NoError(t, err)
		var got []string
		begin := mustTime(tc.night + "T12:00:00Z")
		before, _ := spans.Contains(begin)
		for now := begin; now.Before(begin.Add(15 * time.Hour)); now = now.Add(time.Minute) {
			if inside, _ := spans.Contains(now); inside != before {
				before = inside
				got = append(got, now.Format("15:04"))
			}
		}
		if text := strings.Join(got, " "); text != tc.want {
			t.Errorf("%s: %s in the night of %s changes at %q, want %q", name, tc.item, tc.night, text, tc.want)
		}
	}
}

// TestInvalidSpansAreRefused has what the grammar does not have.
func TestInvalidSpansAreRefused(t *testing.T) {
	for _, value := range []string{
		"", ",", "always,", "sometimes", "Mon-Fri", "Mon-Fri 8-18 PST", "Mon-Fri 8-18 Local", "Mon-Fri 8-18 ../../etc", "Mon-Fri 8-18 /etc/localtime",
		"Mon-Fri 8-18 posixrules", "Mon-Fri 8-18 europe/berlin", "Mon-Fri 8-18 Europe", "Mon-Fri 8-18 Europe/Berlin/x", "Mon-Fri 8-18 Nowhere",
		"Fri 8-18 UTC", "Mon-Fry 8-18 UTC", "Mon-Tue-Wed 8-18 UTC", "Mon-Fri 8:5-18 UTC", "Mon-Fri 08:60-18 UTC", "Mon-Fri 24:01-8 UTC", "Mon-Fri 25-8 UTC",
		"Mon-Fri 008-18 UTC", "Mon-Fri +8-18 UTC", "Mon-Fri 8--18 UTC", "Mon-Fri 8-18-20 UTC", "Mon-Fri 8 UTC", "Mon-Fri 08:00 - 18:00 UTC", "Mon-Fri 8-18 UTC x",
		"2026-11-25T08:00:00Z", "2026-11-25T08:00:00-2026-11-26T08:00:00", "2026-11-25T08:00:00Z 2026-11-26T08:00:00Z", "2026-13-25T08:00:00Z-2026-11-26T08:00:00Z",
		"2026-11-25-2026-11-26", "from", "from ", "from 2026-11-25", "from2026-11-25T08:00:00Z", "until 2026-11-25T08:00:00Z x", "from - 2026-11-25T08:00:00Z", "from 2026-11-25T8:00:00.0Z",
		strings.Repeat("x", 3000), strings.Repeat("never,", 50) + "never", "Mon-Fri " + strings.Repeat("8", 100) + " UTC", "Mon-Fri 8-18 \xff",
	} {
		if spans, err := ParseSpans(value, everyDay); err == nil {
			t.Errorf("%q is %v", value, spans)
		} else if len(err.Error()) > 250 {
			t.Errorf("%q: the error has %d bytes", truncate(value), len(err.Error()))
		}
	}
	if _, err := ParseSpans("8-18", Defaults{Zone: time.UTC}); err == nil {
		t.Error("no days")
	}
	if _, err := ParseSpans("Mon-Fri 8-18", Defaults{Days: ptrTo(Days(127))}); err == nil {
		t.Error("no zone")
	}
	if _, err := ParseSpans(strings.Repeat("never,", 49)+"always", everyDay); err != nil {
		t.Errorf("50 items: %v", err)
	}
}

// hostileSpans is a value that takes as long as possible: as many items as it may have, in several zones.
func hostileSpans() string {
	zones := []string{"Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca"}
	var items []string
	for i := range maxItems {
		items = append(items, fmt.Sprintf("Mon-Sun 1:%02d-2 %s", i, zones[i%len(zones)]))
	}
	return strings.Join(items, ",")
}

func BenchmarkParse(b *testing.B) {
	value := hostileSpans()
	b.SetBytes(int64(len(value)))
	for b.Loop() {
		if _, err := ParseSpans(value, Defaults{}); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkInvalidZone(b *testing.B) {
	for b.Loop() {
		if _, err := ParseSpans("Mon-Fri 8-18 Europe/Nowhere", Defaults{}); err == nil {
			b.Fatal("no error")
		}
	}
}

func BenchmarkAt(b *testing.B) {
	for name, now := range map[string]string{"in a season": "2026-07-01T12:00:00Z", "on a change": "2026-03-29T00:30:00Z"} {
		b.Run(name, func(b *testing.B) {
			spans, err := ParseSpans(hostileSpans(), Defaults{})
			assert.NoError(b, err)
			for b.Loop() {
				spans.Contains(mustTime(now))
			}
		})
	}
}
