// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// day is what happens in a busy namespace. What is to be rolled follows from it alone: each change
// of data is one rollout of each Deployment that uses them, and nothing else is one.
type day struct {
	shop
	content map[string]string   // of each ConfigMap
	uses    map[string][]string // ConfigMaps by Deployment
	want    map[string]int
	serial  int
}

func (d *day) next(prefix string) string {
	d.serial++
	return fmt.Sprint(prefix, "-", d.serial)
}

// pick returns a key of m.
func pick[V any](r *rand.Rand, m map[string]V) string {
	return slices.Sorted(maps.Keys(m))[r.IntN(len(m))]
}

// set gives a ConfigMap new data and waits for the rollouts that follow, so that their number does
// not depend on how many changes one rollout takes together.
func (d *day) set(name string, write func(content string)) {
	d.t.Helper()
	d.content[name] = d.next("data")
	write(d.content[name])
	for app, names := range d.uses {
		if slices.Contains(names, name) {
			d.want["deployments/"+app]++
			d.waitForMark("deployments/"+app, "configmap/"+name)
		}
	}
}

func (d *day) change(name string) {
	d.t.Helper()
	d.set(name, func(content string) { d.configMap(name, content) })
}

// add creates a Deployment with a ConfigMap of its own.
func (d *day) add() string {
	d.t.Helper()
	name := d.next("app")
	d.content[name] = "first"
	d.configMap(name, "first")
	d.create(newDeployment(name, is(auto, "true"), uses("configmap/"+name), uses("configmap/shared")))
	d.uses[name] = []string{name, "shared"}
	return name
}

// events are what happens, with how often among all.
func (d *day) events(r *rand.Rand) map[string]func() {
	app := func() string { return "deployments/" + pick(r, d.uses) }
	source := func() string { return pick(r, d.content) }
	return map[string]func(){
		"data change":        func() { d.change(pick(r, d.uses)) },
		"shared data change": func() { d.change("shared") },
		"data are written again": func() {
			name := source()
			d.patch("configmaps/"+name, fmt.Sprintf(`{"data":{"content":%q}}`, d.content[name]))
		},
		"a source gets a label": func() {
			d.patch("configmaps/"+source(), fmt.Sprintf(`{"metadata":{"labels":{"l":%q}}}`, d.next("l")))
		},
		"a source gets an annotation": func() {
			d.patch("configmaps/"+source(), fmt.Sprintf(`{"metadata":{"annotations":{"a":%q}}}`, d.next("a")))
		},
		"a workload gets a label": func() {
			d.patch(app(), fmt.Sprintf(`{"metadata":{"labels":{"l":%q}}}`, d.next("l")))
		},
		"a status changes": func() {
			client, name := d.client(app())
			body := fmt.Sprintf(`{"status":{"conditions":[{"type":"Day","status":"True","reason":%q}]}}`, d.next("Reason"))
			if _, err := client.Patch(d.t.Context(), name, types.MergePatchType, []byte(body), metav1.PatchOptions{}, "status"); err != nil {
				d.t.Fatal(err)
			}
		},
		"somebody releases a version": func() {
			d.patch(app(), fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"version":%q}}}}}`, d.next("v")))
		},
		"a workload comes": func() { d.add() },
		"a workload comes, and its data change at once": func() { d.change(d.add()) },
		"a workload goes and comes again": func() {
			name := pick(r, d.uses)
			d.delete("deployments/" + name)
			d.create(newDeployment(name, is(auto, "true"), uses("configmap/"+name), uses("configmap/shared")))
		},
		"a source goes and comes again": func() {
			name := pick(r, d.uses)
			d.delete("configmaps/" + name)
			d.configMap(name, d.content[name])
		},
		"a source goes and comes with other data": func() {
			name := pick(r, d.uses)
			d.waitForState("deployments/"+name, "configmap/"+name, "configmap/shared") // what it had is known
			d.delete("configmaps/" + name)
			d.change(name)
		},
		"somebody who needs nothing comes": func() {
			d.create(newDeployment(d.next("silent"), nil, uses("configmap/shared")))
		},
		"a rollout is undone": func() {
			name := pick(r, d.uses)
			object := "deployments/" + name
			d.waitForState(object, "configmap/"+name, "configmap/shared")
			before := d.get(object)
			d.change(name)
			manifest, err := json.Marshal(map[string]any{"spec": before.Object["spec"], "metadata": map[string]any{
				"annotations": map[string]any{fleet.StateAnnotation: before.GetAnnotations()[fleet.StateAnnotation]}}})
			if err != nil {
				d.t.Fatal(err)
			}
			d.patch(object, string(manifest))
			delete(d.uses, name) // a later leader knows only what is written, which is not repeated for ten minutes
			delete(d.content, name)
			d.waitForState(object, "configmap/"+name, "configmap/shared")
			d.patch(object, `{"metadata":{"annotations":{"`+auto+`":null}}}`)
			d.eventually(func() error { return diff("", d.annotation(object, fleet.StateAnnotation)) })
		},
	}
}

func TestLongADayOfABusyNamespace(t *testing.T) {
	const steps, handovers = 240, 3
	ctx := fleet.Context(t)
	begin := time.Now()
	r := rand.New(rand.NewPCG(18, 1))
	d := &day{shop: newShop(t, nil), content: map[string]string{"shared": "first"}, uses: map[string][]string{}, want: map[string]int{}}
	d.configMap("shared", "first")
	for range 5 {
		d.add()
	}
	leader, standby := shared.RunLeader(ctx, t, atOnce()...), shared.RunStandby(ctx, t, atOnce()...)
	happens := d.events(r)
	names := slices.Sorted(maps.Keys(happens))
	count := map[string]int{}
	for step := range steps {
		if (step+1)%(steps/(handovers+1)) == 0 {
			leader, standby = d.handOver(leader, standby)
		}
		name := names[r.IntN(len(names))]
		count[name]++
		happens[name]()
	}
	t.Logf("events: %v", count)
	lastWord(t)
	readLog(t, begin)
	maps.DeleteFunc(d.want, func(_ string, n int) bool { return n == 0 })
	if diff := cmp.Diff(d.want, d.counts()); diff != "" {
		t.Errorf("rollouts (-want +got):\n%s", diff)
	}
}

// handOver stops the leader, and returns the new one with a new standby.
func (d *day) handOver(leader, standby *cluster.Manager) (*cluster.Manager, *cluster.Manager) {
	d.t.Helper()
	ctx := fleet.Context(d.t)
	if err := leader.Signal(syscall.SIGTERM); err != nil {
		d.t.Fatal(err)
	}
	shared.WaitForLeader(ctx, d.t, standby)
	return standby, shared.RunStandby(ctx, d.t, atOnce()...)
}
