// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
)

// TestHostileTenantDelaysNobody tries what somebody with one namespace can.
func TestHostileTenantDelaysNobody(t *testing.T) {
	for name, run := range map[string]func(f *fixture){
		"300 workloads that are due delay nobody": func(f *fixture) {
			for i := range 300 {
				f.add(deployment(fmt.Sprintf("hostile/a%d", i), 3, ds+"downtime", span(time.Minute, 2*time.Hour)))
			}
			f.add(deployment("shop/a", 3, ds+"downtime", span(time.Minute+time.Second, 2*time.Hour)))
			f.start()
			f.Sleep(time.Minute + 2*time.Second)
			f.expectReplicas("shop/a", "0 (3)")
			if n := len(f.takeRequests()); n > 50 {
				f.Errorf("%d requests before", n)
			}
		},
		"who raises at once, all day, costs three writes a downtime": func(f *fixture) {
			f.add(deployment("shop/a", 3, ds+"downtime", span(0, 12*time.Hour)+","+span(13*time.Hour, 23*time.Hour)))
			f.start()
			for range 24 * 60 {
				f.Sleep(time.Minute)
				d := controllertest.Get[appsv1.Deployment](f.Host, "shop", "a")
				if *d.Spec.Replicas == 0 {
					f.scale("shop/a", 3)
				}
			}
			// Down, three times down again and up, in each of two downtimes.
			if n := len(slices.DeleteFunc(f.takeRequests(), func(r string) bool { return r != patchA })); n > 10 {
				f.Errorf("%d writes", n)
			}
		},
		"who writes the annotation all the time costs one write for each": func(f *fixture) {
			f.add(deployment("shop/a", 3))
			f.start()
			for i := range 20 {
				f.annotate("shop/a", ds+"downtime", []string{"always", "never"}[i%2])
			}
			if n := len(slices.DeleteFunc(f.takeRequests(), func(r string) bool { return r != patchA })); n > 20 {
				f.Errorf("%d writes", n)
			}
		},
		"2,000 workloads with nonsense have one warning each, and no request": func(f *fixture) {
			nonsense := []string{strings.Repeat("never,", 20_000), "Mon-Fri 8-18 ../../etc/passwd", strings.Repeat("8-18 UTC,", 227), "\x00", "from " + strings.Repeat("9", 2000)}
			for i := range 2000 {
				f.add(deployment(fmt.Sprintf("hostile/a%d", i), 3, ds+"downtime", nonsense[i%len(nonsense)], ds+"exclude", nonsense[(i+1)%len(nonsense)]))
			}
			f.add(deployment("shop/a", 3, ds+"downtime", "always"))
			f.start()
			f.expectReplicas("shop/a", "0 (3)")
			f.Sleep(24 * time.Hour)
			if n := len(f.takeRequests()); n > 2 {
				f.Errorf("%d requests", n)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { run(newFixture(t, withWriteLimit)) })
		})
	}
}

// TestLongYearKeepsItsSchedule runs the manager for a year on fake time, and compares when each workload was
// scaled with what clocks on the wall show.
func TestLongYearKeepsItsSchedule(t *testing.T) {
	zones := []string{"Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"}
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(c *scaleschedule.Config) { c.Weekdays, c.Kinds = "Mon-Fri", []string{"deployments"} })
		// More renewals of the Lease, and watches of other kinds, would be most of the requests of a year.
		f.flags = append(f.flags, "--leader-elect-lease-duration=10m", "--leader-elect-renew-deadline=8m", "--leader-elect-retry-period=4m")
		got := map[string][]string{}
		for _, zone := range zones {
			f.add(deployment("shop/"+strings.ToLower(zone[len(zone)-4:]), 3, ds+"uptime", "01:45-20:30 "+zone))
		}
		f.requestHook = func(r controllertest.Request) error {
			if r.Verb == "patch" {
				direction := " up"
				if strings.Contains(string(r.Body), `"replicas":0`) {
					direction = " down"
				}
				got[r.Name] = append(got[r.Name], time.Now().UTC().Format("2006-01-02T15:04")+direction)
			}
			return nil
		}
		f.start()
		begin := time.Now()
		for range 366 {
			f.Sleep(24 * time.Hour)
		}
		for _, name := range zones {
			zone, err := time.LoadLocation(name)
			if err != nil {
				t.Fatal(err)
			}
			var want []string
			up := true // as it was before
			day, reached := 0, [2]bool{}
			for at := begin.Add(-48 * time.Hour).Truncate(time.Minute); at.Before(time.Now()); at = at.Add(time.Minute) {
				wall := at.In(zone)
				if wall.YearDay() != day {
					day, reached = wall.YearDay(), [2]bool{}
				}
				minute := wall.Hour()*60 + wall.Minute()
				reached[0], reached[1] = reached[0] || minute >= 105, reached[1] || minute >= 20*60+30
				now := reached[0] && !reached[1] && wall.Weekday()%6 != 0
				if at.Add(time.Minute).After(begin) && now != up {
					up = now
					want = append(want, at.UTC().Format("2006-01-02T15:04")+map[bool]string{true: " up", false: " down"}[up])
				}
			}
			if scaled := got[strings.ToLower(name[len(name)-4:])]; !slices.Equal(scaled, want) || len(want) < 500 {
				t.Errorf("%s: scaled %d times, want %d; the first are %q, %q", name, len(scaled), len(want), scaled[:min(3, len(scaled))], want[:min(3, len(want))])
			}
		}
	})
}
