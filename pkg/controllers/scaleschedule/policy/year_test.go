// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"fmt"
	"testing"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// change is a moment at which a workload goes inside of a span, or outside.
type change struct {
	time   string
	inside bool
}

// yearlySpans are the spans that every zone is tried with: days as ParseDays has them, times in minutes.
var yearlySpans = []struct {
	item       string
	days       string // by weekday from Sunday on
	start, end int
}{
	{"Mon-Fri 07:30-20:30", "_MTWTF_", 450, 1230},
	{"Mon-Sun 02:15-02:45", "SMTWTFS", 135, 165},
	{"Sun-Sun 01:30-02:30", "S______", 90, 150},
	{"Mon-Sun 02:00-03:00", "SMTWTFS", 120, 180},
	{"Fri-Mon 20:00-08:00", "SM___FS", 1200, 480},
	{"Sat-Sun 20:00-00:00", "S_____S", 1200, 1440},
	{"Sun-Thu 0-3", "SMTWT__", 0, 180},
	{"Wed-Sun 03:00-02:00", "S__WTFS", 180, 120},
	{"Mon-Sun 23:45-00:15", "SMTWTFS", 1425, 15},
	{"Sat-Sat 0-24", "______S", 0, 1440},
}

// wallClockChanges returns the changes of every span in a year. It looks at every minute, without offsets: a
// time of the day has been reached when the clock on the wall has shown it, or a later one, on that day.
func wallClockChanges(zone *time.Location, year int) [][]change {
	tables := make([][]change, len(yearlySpans))
	type dayState struct{ start, end, inside bool }
	states := make([]dayState, len(yearlySpans))
	var today time.Time // the latest that has begun
	begin, end := time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(year+1, 1, 1, 0, 0, 0, 0, time.UTC)
	for t := begin.AddDate(0, 0, -3); t.Before(end); t = t.Add(time.Minute) {
		wall := t.In(zone)
		y, m, d := wall.Date()
		minute := wall.Hour()*60 + wall.Minute()
		date := time.Date(y, m, d, 0, 0, 0, 0, time.UTC)
		begins := date.After(today)
		if begins {
			today = date
		} else if date.Before(today) {
			minute = 0 // the clock went back into yesterday; today has begun
		}
		for i := range yearlySpans {
			day, row := &states[i], yearlySpans[i]
			if begins {
				day.start, day.end = false, false
			}
			day.start, day.end = day.start || minute >= row.start, day.end || minute >= row.end
			inside := day.start && !day.end
			if row.start > row.end {
				inside = day.start || !day.end
			}
			inside = inside && row.days[today.Weekday()] != '_'
			if inside != day.inside && !t.Before(begin) {
				tables[i] = append(tables[i], change{t.Format(time.RFC3339), inside})
			}
			day.inside = inside
		}
	}
	return tables
}

// boundaryChanges returns the changes of a span in a year, by waiting for the next boundary each time.
func boundaryChanges(t *testing.T, item string, year int) (changes []change) {
	t.Helper()
	spans, err := ParseSpans(item, Defaults{})
	assert.NoError(t, err)
	begin, end := time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(year+1, 1, 1, 0, 0, 0, 0, time.UTC)
	before, _ := spans.Contains(begin.Add(-time.Minute))
	steps := 0
	for now := begin; now.Before(end); steps++ {
		inside, next := spans.Contains(now)
		if inside != before {
			changes = append(changes, change{now.UTC().Format(time.RFC3339), inside})
		}
		if !next.After(now) {
			t.Fatalf("%s: at %v the next boundary is %v", item, now, next)
		}
		before, now = inside, next
	}
	if steps > 366*4 {
		t.Errorf("%s: woke up %d times", item, steps)
	}
	return changes
}

// TestSpansChangeAsTheWallClockShows compares every boundary of a year with a table.
func TestSpansChangeAsTheWallClockShows(t *testing.T) {
	for _, tc := range []struct {
		zone  string
		years []int
	}{
		{"Europe/Berlin", []int{2026, 2027}},
		{"America/New_York", []int{2026}},
		{"Australia/Lord_Howe", []int{2026}}, // by half an hour
		{"Asia/Kathmandu", []int{2026}},      // 05:45, and never changes
		{"Africa/Cairo", []int{2026}},        // at midnight
		{"America/Nuuk", []int{2026}},        // from 22:00, and back from midnight into yesterday
		{"America/Sao_Paulo", []int{2018}},   // at midnight, in the south
		{"America/St_Johns", []int{2010}},    // at 00:01, back into yesterday when today has begun
		{"Pacific/Apia", []int{2011}},        // had no 30 December
		{"Africa/Casablanca", []int{2026}},   // winter time in Ramadan
		{"UTC", []int{2028}},
	} {
		zone, err := ParseZone(tc.zone)
		assert.NoError(t, err)
		for _, year := range tc.years {
			tables := wallClockChanges(zone, year)
			for i, want := range tables {
				item := yearlySpans[i].item + " " + tc.zone
				got := boundaryChanges(t, item, year)
				if len(want) < 50 {
					t.Fatalf("%s: the table has %d changes", item, len(want))
				}
				for j := range max(len(got), len(want)) {
					if j >= len(got) || j >= len(want) || got[j] != want[j] {
						t.Errorf("%s in %d: change %d is %v, want %v", item, year, j, tail(got, j), tail(want, j))
						break
					}
				}
			}
		}
	}
}

// TestDayThatBeginsTwiceStaysInside looks at the hour before midnight that came again in Newfoundland, when
// Sunday had begun for a minute.
func TestDayThatBeginsTwiceStaysInside(t *testing.T) {
	spans, err := ParseSpans("Sun-Sun 0-24 America/St_Johns", Defaults{})
	assert.NoError(t, err)
	for now := mustTime("2010-11-07T02:30:00Z"); now.Before(mustTime("2010-11-07T05:00:00Z")); now = now.Add(time.Minute) {
		if inside, next := spans.Contains(now); !inside || !next.After(now) {
			t.Errorf("at %v, on the wall %v: inside is %t, the next boundary %v", now, now.In(spans[0].(weeklySpan).zone), inside, next)
		}
	}
}

func tail(changes []change, start int) string {
	if start >= len(changes) {
		return "none"
	}
	return fmt.Sprint(changes[start:min(start+2, len(changes))])
}
