// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func (f *fixture) patch(name, patch string) {
	f.Helper()
	if _, err := shared.Admin.AppsV1().Deployments(f.namespace).Patch(f.ctx, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		f.Error(err)
	}
}

// TestMigrationWritesNothing takes over at night, with an original's flags. What the original has scaled down
// comes up when it is to be up.
func TestMigrationWritesNothing(t *testing.T) {
	for name, original := range map[string]struct {
		flags []string
		// night is the key, and its value, with which workloads of the Namespace are down; kept of one that is not.
		night, kept [2]string
	}{
		"py-kube-downscaler with the flags of its chart": {
			flags: []string{"--scale-schedule-kinds=deployments,statefulsets", "--scale-schedule-exclude-namespaces=py-kube-downscaler,kube-downscaler,kube-system"},
			night: [2]string{"uptime", "never"}, kept: [2]string{"exclude", "true"},
		},
		"GoKubeDownscaler with a time zone and days in its environment": {
			flags: []string{"--scale-schedule-kinds=deployments", "--scale-schedule-timezone=Europe/Berlin", "--scale-schedule-weekdays=Mon-Sun"},
			night: [2]string{"downtime", "00:00-24:00"}, kept: [2]string{"exclude-until", "2999-12-31T00:00:00Z"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, 2*fleet.Patience)
			flags := args(original.flags...)
			f.annotate(prefix+original.night[0], original.night[1])
			f.deploy("down", nil)
			f.patch("down", `{"metadata":{"annotations":{"downscaler/original-replicas":"3"}},"spec":{"replicas":0}}`)
			f.deploy("stopped", nil)
			f.patch("stopped", `{"spec":{"replicas":0}}`)
			f.deploy("kept", map[string]string{prefix + original.kept[0]: original.kept[1]})
			f.deploy("invalid", map[string]string{prefix + "uptime": "Mon-Fri 8-18 PST"})
			dry := shared.RunLeader(f.ctx, t, append(flags, "--scale-schedule-dry-run")...)
			f.waitForEvent("invalid", "InvalidSchedule")
			if err := dry.Stop(f.ctx, fleet.Patience); err != nil {
				t.Error(err)
			}
			shared.RunLeader(f.ctx, t, flags...)
			f.deploy("new", nil)
			f.waitForState("0 (3)", 2) // new, and down
			patches := f.patches(f.begin)
			if delete(patches, "new"); len(patches) > 0 {
				t.Errorf("the migration has written %q", patches)
			}
			f.annotate(prefix+original.night[0], "")
			f.waitForState("3", 4)
			if states := f.states(); states["0"] != 1 {
				t.Errorf("%v", states)
			}
		})
	}
}

// TestLongTenantWithNonsenseDelaysNobody has a tenant whose Deployments have annotations that are long,
// absurd and change all the time, while some are deleted, and somebody else's Deployment that is due
// meanwhile.
func TestLongTenantWithNonsenseDelaysNobody(t *testing.T) {
	workloads := fleet.Setting(t, "SCALE_NONSENSE", 2000)
	f, other := newFixture(t, 8*time.Minute), newFixture(t, 8*time.Minute)
	m := shared.RunReleased(f.ctx, t, args()...)
	before := shared.MemoryOf(f.ctx, t, m)
	nonsense := []string{
		"x", strings.Repeat("x", 250<<10), strings.Repeat("never,", 300), "Mon-Fri 8-18 ../../etc/passwd", strings.Repeat("8-9 Europe/Berlin,", 40) + "always", "-", "Sun-Sat 24-0 Etc/GMT+12",
		"from 0001-01-01T00:00:00+14:00, until 9999-12-31T23:59:59.999999999-12:00", "2147483648", "1ns", "Mon-Mon 00:00-24:00 Antarctica/Troll",
	}
	keys := []string{"uptime", "downtime", "force-uptime", "exclude", "exclude-until", "downtime-replicas", "grace-period", "original-replicas"}
	nonsenseAnnotations := func(i int) map[string]string {
		return map[string]string{prefix + keys[i%len(keys)]: nonsense[i%len(nonsense)], prefix + "downscale-period": nonsense[(i+2)%len(nonsense)][:min(100, len(nonsense[(i+2)%len(nonsense)]))]}
	}
	var creating sync.WaitGroup
	for part := range 10 {
		creating.Go(func() {
			for i := part; i < workloads; i += 10 {
				f.deploy(fmt.Sprintf("a%d", i), nonsenseAnnotations(i))
			}
		})
	}
	creating.Wait()
	writing, stop := context.WithCancel(f.ctx)
	var tenants sync.WaitGroup
	deployments := shared.Admin.AppsV1().Deployments(f.namespace)
	for part := range 4 {
		tenants.Go(func() {
			for n := part; writing.Err() == nil; n += 4 {
				name := fmt.Sprintf("a%d", n%workloads)
				if n%5 == 0 {
					_ = deployments.Delete(writing, name, metav1.DeleteOptions{})
					continue
				}
				_, _ = deployments.Patch(writing, name, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{"downscaler/downtime":%q}},"spec":{"replicas":%d}}`,
					[]string{"always", "never", "x"}[n%3], n%7), metav1.PatchOptions{})
			}
		})
	}
	other.deploy("a", nil)
	begin := time.Now()
	other.annotate(prefix+"downtime", "always")
	other.waitForState("0 (3)", 1)
	t.Logf("somebody else's Deployment was scaled %v after its annotation", time.Since(begin).Round(time.Millisecond))
	fleet.Wait(f.ctx, 20*time.Second)
	stop()
	tenants.Wait()
	growth := shared.MemoryOf(f.ctx, t, m).Minus(before)
	t.Logf("%d Deployments take %v", workloads, growth)
	if growth.Live > 4+float64(4*workloads)/1024 { // MiB: what any Deployments take, and 4 KiB each
		t.Errorf("%.1f MiB of live heap", growth.Live)
	}
}
