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

// zones has the time zones that were named, since to load one takes a while. There are about 600 names.
var zones = struct {
	sync.Mutex
	named map[string]*time.Location
}{named: map[string]*time.Location{}}

// ParseZone returns a time zone by its name in the IANA database.
func ParseZone(name string) (*time.Location, error) {
	zones.Lock()
	defer zones.Unlock()
	if zone := zones.named[name]; zone != nil {
		return zone, nil
	}
	// Names begin with a capital. Go knows Local, too, and a system has files such as posixrules.
	if name == "" || name[0] < 'A' || name[0] > 'Z' || name == "Local" || len(name) > 40 {
		return nil, errZone
	}
	zone, err := time.LoadLocation(name)
	if err != nil {
		return nil, errZone
	}
	zones.named[strings.Clone(name)] = zone
	return zone, nil
}

var errZone = errors.New("names no time zone of the IANA database, such as Europe/Berlin")

// longest is longer than every shift of a clock, and than every offset from UTC.
const longest = 24 * time.Hour

// clock is the clock on the wall of a zone, with the offset that it has from one time until another; zero
// is no limit.
type clock struct {
	zone        *time.Location
	offset      time.Duration
	from, until time.Time
}

func clockAt(zone *time.Location, t time.Time) clock {
	t = t.In(zone)
	_, offset := t.Zone()
	from, until := t.ZoneBounds()
	return clock{zone, time.Duration(offset) * time.Second, from, until}
}

// first returns the first moment at which the clock shows the given minute of a day, or a later one. So a
// time that is skipped is the moment of the skip, and one that is there twice is the earlier.
func (c clock) first(year int, month time.Month, day, minute int) time.Time {
	shows := time.Date(year, month, day, 0, minute, 0, 0, time.UTC)
	if t := shows.Add(-c.offset); c.covers(t.Add(-longest)) && c.covers(t) {
		return t
	}
	// Before it in every zone. From there on, the offsets are looked at in turn.
	for t := shows.Add(-longest); ; {
		c = clockAt(c.zone, t)
		at := shows.Add(-c.offset)
		if at.Before(t) {
			at = t // it was skipped, or the clock shows more already
		}
		if c.until.IsZero() || at.Before(c.until) {
			return at
		}
		t = c.until
	}
}

// covers reports whether the clock has this offset at t.
func (c clock) covers(t time.Time) bool {
	return (c.from.IsZero() || !t.Before(c.from)) && (c.until.IsZero() || t.Before(c.until))
}
