// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The bounds of a value. Every sensible schedule is shorter. A longer one is invalid and is not parsed.
const (
	MaxValue = 2048 // bytes
	maxItems = 50
	maxItem  = 100 // bytes
)

// Spans are spans of time. A time is inside Spans if it is inside any span.
type Spans []span

// span is one item of a value.
type span interface {
	// contains reports whether now is inside, and when that may change next; zero if it never does.
	contains(now time.Time) (inside bool, next time.Time)
}

// Defaults are what the items of a value may leave out.
type Defaults struct {
	Days *Days
	Zone *time.Location
}

// ParseSpans parses items that commas separate.
func ParseSpans(value string, defaults Defaults) (Spans, error) {
	if len(value) > MaxValue {
		return nil, errTooLong
	}
	items := strings.Split(value, ",")
	if len(items) > maxItems {
		return nil, fmt.Errorf("has more than %d items", maxItems)
	}
	spans := make(Spans, len(items))
	for i, item := range items {
		item = strings.TrimSpace(item)
		s, err := parseItem(item, defaults)
		if err != nil {
			return nil, fmt.Errorf("%q %w", truncate(item), err)
		}
		spans[i] = s
	}
	return spans, nil
}

// Contains reports whether now is inside, and when that may change next; zero if it never does.
func (s Spans) Contains(now time.Time) (inside bool, next time.Time) {
	for _, item := range s {
		itemInside, change := item.contains(now)
		inside, next = inside || itemInside, earlier(next, change)
	}
	return inside, next
}

// earlier returns the earlier of two times, of which zero is none.
func earlier(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}

func parseItem(item string, defaults Defaults) (span, error) {
	if len(item) > maxItem {
		return nil, errTooLong
	}
	switch {
	case strings.EqualFold(item, "always"), strings.EqualFold(item, "true"):
		return constantSpan(true), nil
	case strings.EqualFold(item, "never"), strings.EqualFold(item, "false"):
		return constantSpan(false), nil
	}
	for _, word := range []string{"from", "until"} {
		if rest, ok := strings.CutPrefix(item, word); ok && strings.TrimLeft(rest, " -") != rest {
			t, rest, err := cutTime(strings.TrimSpace(strings.TrimPrefix(rest, "-")))
			switch {
			case err != nil:
				return nil, err
			case rest != "":
				return nil, errTime
			case word == "from":
				return absoluteSpan{start: t}, nil
			}
			return absoluteSpan{end: t}, nil
		}
	}
	if len(item) > 4 && item[4] == '-' && strings.Trim(item[:4], "0123456789") == "" {
		return parseAbsolute(item)
	}
	return parseWeekly(item, defaults)
}

// constantSpan is always inside, or never.
type constantSpan bool

func (c constantSpan) contains(time.Time) (bool, time.Time) { return bool(c), time.Time{} }

// absoluteSpan is from its start, which counts, until its end, which does not. Zero is no limit.
type absoluteSpan struct{ start, end time.Time }

func (a absoluteSpan) contains(now time.Time) (inside bool, next time.Time) {
	inside = !now.Before(a.start) && (a.end.IsZero() || now.Before(a.end))
	for _, t := range []time.Time{a.start, a.end} {
		if t.After(now) {
			next = earlier(next, t)
		}
	}
	return inside, next
}

var errTime = errors.New("is not a time such as 2026-12-24T18:00:00+01:00, or two with a dash between them")

func parseAbsolute(item string) (span, error) {
	start, rest, err := cutTime(item)
	if err != nil {
		return nil, err
	}
	rest, dash := strings.CutPrefix(strings.TrimSpace(rest), "-")
	end, rest, err := cutTime(strings.TrimSpace(rest))
	if err != nil || !dash || rest != "" {
		return nil, errTime
	}
	return absoluteSpan{start, end}, nil
}

// cutTime parses the time in RFC 3339 with which text begins, and returns what follows it.
func cutTime(text string) (t time.Time, rest string, err error) {
	end := len("2006-01-02T15:04:05")
	for end < len(text) && (text[end] == '.' || text[end] >= '0' && text[end] <= '9') {
		end++
	}
	if end < len(text) && text[end] == 'Z' {
		end++
	} else {
		end += len("+01:00")
	}
	// Package time also takes an hour of one digit.
	if end > len(text) || text[len("2006-01-02T15")] != ':' {
		return t, "", errTime
	}
	if t, err = time.Parse(time.RFC3339, text[:end]); err != nil {
		return t, "", errTime
	}
	return t, text[end:], nil
}

// weeklySpan is a time of the day, in minutes, on days of the week. If it ends before it starts, it is from
// the beginning of the day until its end, and from its start on.
type weeklySpan struct {
	days       Days
	start, end int
	zone       *time.Location
}

const wholeDay = 24 * 60

func parseWeekly(item string, defaults Defaults) (span, error) {
	fields := strings.Fields(item)
	span := weeklySpan{zone: defaults.Zone}
	days := defaults.Days
	if len(fields) > 1 {
		if itemDays, err := ParseDays(fields[0]); err == nil {
			days, fields = &itemDays, fields[1:]
		}
	}
	var err error
	switch len(fields) {
	case 2:
		if span.zone, err = ParseZone(fields[1]); err != nil {
			return nil, err
		}
		fallthrough
	case 1:
		if span.start, span.end, err = parseTimes(fields[0]); err != nil {
			return nil, err
		}
	default:
		return nil, errWeekly
	}
	switch {
	case days == nil:
		return nil, errors.New("has no days, and --scale-schedule-weekdays is not given")
	case span.zone == nil:
		return nil, errors.New("has no time zone, and --scale-schedule-timezone is not given")
	}
	if span.start == span.end {
		return constantSpan(false), nil
	}
	span.days = *days
	return span, nil
}

var errWeekly = errors.New(`is none of "Mon-Fri 07:30-20:30 Europe/Berlin", a span of RFC 3339 times, always, never`)

func parseTimes(text string) (start, end int, err error) {
	first, second, ok := strings.Cut(text, "-")
	if !ok {
		return 0, 0, errWeekly
	}
	if start, err = parseTime(first); err == nil {
		end, err = parseTime(second)
	}
	return start, end, err
}

// parseTime parses 07:30 or 7, and returns the minutes since the beginning of the day.
func parseTime(text string) (int, error) {
	hour, minute, both := strings.Cut(text, ":")
	if !both {
		minute = "00"
	}
	h, err := parseNumber(hour)
	if err != nil || len(hour) > 2 || len(minute) != 2 {
		return 0, errWeekly
	}
	m, err := parseNumber(minute)
	if err != nil || m > 59 || 60*h+m > wholeDay {
		return 0, errWeekly
	}
	return 60*h + m, nil
}

// parseNumber parses digits without a sign.
func parseNumber(digits string) (int, error) {
	n, err := strconv.ParseUint(digits, 10, 31)
	return int(n), err
}

// Days are days of the week: the bit 1<<time.Weekday is set for each.
type Days uint8

var dayNames = []string{"sun", "mon", "tue", "wed", "thu", "fri", "sat"}

// ParseDays parses days such as Mon-Fri. Fri-Mon goes over the end of the week, Fri-Fri is one day.
func ParseDays(text string) (Days, error) {
	firstName, lastName, _ := strings.Cut(text, "-")
	day, lastDay := parseDay(firstName), parseDay(lastName)
	if day < 0 || lastDay < 0 {
		return 0, errDays
	}
	for days := Days(0); ; day = (day + 1) % len(dayNames) {
		days |= 1 << day
		if day == lastDay {
			return days, nil
		}
	}
}

var errDays = errors.New("is not a range of days such as Mon-Fri")

// parseDay returns a time.Weekday, or -1.
func parseDay(name string) int {
	return slices.IndexFunc(dayNames, func(known string) bool { return strings.EqualFold(name, known) })
}

func (w weeklySpan) contains(now time.Time) (inside bool, next time.Time) {
	c := clockAt(w.zone, now)
	year, month, day := now.In(w.zone).Date()
	midnight := c.firstMoment(year, month, day+1, 0)
	for !midnight.After(now) { // the clock went back over midnight: the next day has begun
		day++
		midnight = c.firstMoment(year, month, day+1, 0)
	}
	if w.days&(1<<time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Weekday()) == 0 {
		return false, midnight
	}
	start, end := c.firstMoment(year, month, day, w.start), c.firstMoment(year, month, day, w.end)
	if w.start < w.end {
		inside = !now.Before(start) && now.Before(end)
	} else {
		inside = !now.Before(start) || now.Before(end)
	}
	next = midnight
	for _, t := range []time.Time{start, end} {
		if t.After(now) {
			next = earlier(next, t)
		}
	}
	return inside, next
}
