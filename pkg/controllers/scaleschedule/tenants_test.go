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
