// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"strings"
	"sync"
	"time"
	_ "time/tzdata" // images have no zones
)

// zoneCache has the time zones that were named, since to load one takes a while. There are about 600 names.
var zoneCache = struct {
	sync.Mutex
	zones map[string]*time.Location
}{zones: map[string]*time.Location{}}

// ParseZone returns a time zone by its name in the IANA database.
func ParseZone(name string) (*time.Location, error) {
	zoneCache.Lock()
	defer zoneCache.Unlock()
	if zone := zoneCache.zones[name]; zone != nil {
		return zone, nil
	}
	// Names begin with a capital and have fewer than 40 bytes. Go knows Local, too, and a system has files such
	// as posixrules.
	if name == "" || name[0] < 'A' || name[0] > 'Z' || name == "Local" || len(name) > 40 {
		return nil, errZone
	}
	zone, err := time.LoadLocation(name)
	if err != nil {
		return nil, errZone
	}
	zoneCache.zones[strings.Clone(name)] = zone
	return zone, nil
}

var errZone = errors.New("names no time zone of the IANA database, such as Europe/Berlin")

// maxOffset is longer than every shift of a clock, and than every offset from UTC.
const maxOffset = 24 * time.Hour

// clock is the clock on the wall of a zone, with the offset that it has from start until end; zero is no
// limit.
type clock struct {
	zone       *time.Location
	offset     time.Duration
	start, end time.Time
}

func clockAt(zone *time.Location, t time.Time) clock {
	t = t.In(zone)
	_, offset := t.Zone()
	start, end := t.ZoneBounds()
	return clock{zone, time.Duration(offset) * time.Second, start, end}
}

// firstMoment returns the first moment at which the clock shows the given minute of a day, or a later one. So
// a time that the clock skips is the moment of the skip, and a time that it shows twice is the earlier
// moment.
func (c clock) firstMoment(year int, month time.Month, day, minute int) time.Time {
	wall := time.Date(year, month, day, 0, minute, 0, 0, time.UTC)
	if t := wall.Add(-c.offset); c.covers(t.Add(-maxOffset)) && c.covers(t) {
		return t
	}
	// Begin before the moment in every zone, and look at each offset from there on.
	for t := wall.Add(-maxOffset); ; {
		c = clockAt(c.zone, t)
		at := wall.Add(-c.offset)
		if at.Before(t) {
			at = t // the clock skips this time, or shows a later one at t already
		}
		if c.end.IsZero() || at.Before(c.end) {
			return at
		}
		t = c.end
	}
}

// covers reports whether the clock has this offset at t.
func (c clock) covers(t time.Time) bool {
	return (c.start.IsZero() || !t.Before(c.start)) && (c.end.IsZero() || t.Before(c.end))
}
