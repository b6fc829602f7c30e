// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func TestDecisionFollowsFromTheState(t *testing.T) {
	const labels, annotations = 1, 2
	live := func(version string) *LiveObject {
		return &LiveObject{Version: version, Labels: labels, Annotations: annotations}
	}
	deleting := &LiveObject{Version: "gen:1", Deleting: true}
	plain := OverrideDigest{Labels: labels}
	annotated := OverrideDigest{Labels: labels, Annotations: true}
	knownHash, otherHash := uint64(annotations), uint64(annotations+1)
	tests := map[string]struct {
		state State
		want  Action
	}{
		"the host's own Namespace that is being deleted needs nothing if wanted":     {State{Exists: true, Wanted: true, Live: deleting, IsHostNamespace: true}, Nothing},
		"the host's own Namespace that is being deleted needs nothing if not wanted": {State{Exists: true, Live: deleting, IsHostNamespace: true}, Nothing},
		"an object that is wanted and being deleted is waited for":                   {State{Exists: true, Wanted: true, Live: deleting}, Wait},
		"an object that is not wanted and being deleted is waited for":               {State{Exists: true, Live: deleting}, Wait},
		"an object without a federated object that is being deleted is waited for":   {State{Live: deleting}, Wait},
		"an object that is wanted and absent is created":                             {State{Exists: true, Wanted: true}, Create},
		"an object that is wanted and absent, but was written, is created":           {State{Exists: true, Wanted: true, WrittenVersion: "gen:1"}, Create},
		"an object as written needs nothing":                                         {State{Exists: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: plain}, Nothing},
		"an object as written by its resourceVersion needs nothing":                  {State{Exists: true, Wanted: true, Live: live("rv:7"), WrittenVersion: "rv:7", Rendered: plain}, Nothing},
		"an object with another label is updated":                                    {State{Exists: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: OverrideDigest{Labels: labels + 1}}, Update},
		"a Namespace with labels of its own needs nothing":                           {State{Exists: true, Wanted: true, Live: live("rv:7"), WrittenVersion: "rv:7", Rendered: OverrideDigest{Labels: labels + 1}}, Nothing},
		"an object that drifted is updated":                                          {State{Exists: true, Wanted: true, Live: live("gen:2"), WrittenVersion: "gen:1", Rendered: plain}, Update},
		"an object of which no write is known is updated":                            {State{Exists: true, Wanted: true, Live: live("gen:1"), Rendered: plain}, Update},
		"annotations of others change, and none are overridden":                      {State{Exists: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: plain, LiveAnnotations: &otherHash}, Nothing},
		"overridden annotations as seen":                                             {State{Exists: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: annotated, LiveAnnotations: &knownHash}, Nothing},
		"overridden annotations changed":                                             {State{Exists: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: annotated, LiveAnnotations: &otherHash}, Update},
		"overridden annotations after a restart":                                     {State{Exists: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: annotated}, Update},
		"the host's own Namespace loses its label if not wanted":                     {State{Exists: true, Live: live("rv:7"), IsHostNamespace: true}, Unlabel},
		"an object that is not wanted is removed":                                    {State{Exists: true, Live: live("gen:1")}, Remove},
		"an object that is not wanted and absent needs nothing":                      {State{Exists: true}, Nothing},
		"an object without a federated object loses its label":                       {State{Live: live("gen:1")}, Unlabel},
		"an absent object without a federated object needs nothing":                  {State{}, Nothing},
		"an object that is not wanted but kept loses its label":                      {State{Exists: true, KeepUnwanted: true, Live: live("gen:1")}, Unlabel},
		"an object that is kept and wanted needs nothing":                            {State{Exists: true, KeepUnwanted: true, Wanted: true, Live: live("gen:1"), WrittenVersion: "gen:1", Rendered: plain}, Nothing},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := Decide(tc.state); got != tc.want {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}

func TestAdoptionIsRefusedByLabelAndConfig(t *testing.T) {
	label := func(value string) map[string]string { return map[string]string{ManagedLabel: value} }
	adopting, refusing := DefaultConfig(), DefaultConfig()
	refusing.AdoptResources = false
	tests := map[string]struct {
		labels          map[string]string
		isHostNamespace bool
		config          Config
		status          string
	}{
		"an object that was there is adopted":                         {config: adopting},
		"an object that was there is refused if adoption is off":      {config: refusing, status: AlreadyExists},
		"the host's own, adoption is off":                             {config: refusing, isHostNamespace: true},
		"an object labelled as not managed is refused":                {labels: label("false"), config: adopting, status: ManagedLabelFalse},
		"the host's own Namespace labelled as not managed is refused": {labels: label("false"), isHostNamespace: true, config: adopting, status: ManagedLabelFalse},
		"labelled, and the cache did not know":                        {labels: label("true"), config: refusing},
		"labelled with a word":                                        {labels: label("yes"), config: refusing, status: AlreadyExists},
		"other labels, and it may be adopted":                         {labels: map[string]string{"a": "b"}, config: adopting},
		"other labels, and it may not be taken":                       {labels: map[string]string{"a": "b"}, config: refusing, status: AlreadyExists},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if status := AdoptionRefusal(&metav1.ObjectMeta{Labels: tc.labels}, tc.isHostNamespace, tc.config); status != tc.status {
				t.Errorf("got %q, want %q", status, tc.status)
			}
		})
	}
}

func TestOnlyManagedObjectsAreRemoved(t *testing.T) {
	label, deleted := map[string]string{ManagedLabel: "true"}, metav1.NewTime(now)
	adopted := map[string]string{AdoptedAnnotation: "true"}
	tests := map[string]struct {
		kind string
		live metav1.ObjectMeta
		want Action
	}{
		"a managed object is deleted":            {"ConfigMap", metav1.ObjectMeta{Labels: label}, Remove},
		"the label is gone":                      {"ConfigMap", metav1.ObjectMeta{}, Nothing},
		"the label says not managed":             {"ConfigMap", metav1.ObjectMeta{Labels: map[string]string{ManagedLabel: "false"}}, Nothing},
		"being deleted":                          {"ConfigMap", metav1.ObjectMeta{Labels: label, DeletionTimestamp: &deleted}, Wait},
		"a Namespace of the federation":          {"Namespace", metav1.ObjectMeta{Labels: label}, Remove},
		"an adopted Namespace loses its label":   {"Namespace", metav1.ObjectMeta{Labels: label, Annotations: adopted}, Unlabel},
		"only a Namespace counts as adopted":     {"ConfigMap", metav1.ObjectMeta{Labels: label, Annotations: adopted}, Remove},
		"an adopted Namespace without its label": {"Namespace", metav1.ObjectMeta{Annotations: adopted}, Nothing},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if got := ActionToRemove(typeOf(tc.kind), &tc.live); got != tc.want {
				t.Errorf("%v, want %v", got, tc.want)
			}
		})
	}
}

func TestRemovalsWaitAndAreHeldByTheGuard(t *testing.T) {
	const delay = 20 * time.Second
	settled := Removals{ReadySince: now.Add(-delay), Deletions: 20, Managed: 20}
	settledWith := func(change func(*Removals)) Removals { r := settled; change(&r); return r }
	tests := map[string]struct {
		removals Removals
		guard    int
		want     string
		wait     time.Duration
	}{
		"the cluster has been ready for 5 s":                          {removals: settledWith(func(r *Removals) { r.ReadySince = now.Add(-5 * time.Second) }), guard: 100, want: WaitingForRemoval, wait: 15 * time.Second},
		"a replaced cluster, even if removals are allowed":            {removals: settledWith(func(r *Removals) { r.Replaced, r.AllowedUntil = true, now.Add(time.Second) }), guard: 100, want: RemovalHeld},
		"the guard holds the removal of all of 20 objects":            {removals: settled, guard: 50, want: RemovalHeld},
		"the guard lets an allowed removal of all of 20 objects pass": {removals: settledWith(func(r *Removals) { r.AllowedUntil = now.Add(time.Second) }), guard: 50},
		"all of 20, allowed until now":                                {removals: settledWith(func(r *Removals) { r.AllowedUntil = now }), guard: 50, want: RemovalHeld},
		"10 of 10":                                                    {removals: settledWith(func(r *Removals) { r.Deletions, r.Managed = 10, 10 }), guard: 50},
		"11 of 11":                                                    {removals: settledWith(func(r *Removals) { r.Deletions, r.Managed = 11, 11 }), guard: 50, want: RemovalHeld},
		"50 of 100":                                                   {removals: settledWith(func(r *Removals) { r.Deletions, r.Managed = 50, 100 }), guard: 50},
		"51 of 100":                                                   {removals: settledWith(func(r *Removals) { r.Deletions, r.Managed = 51, 100 }), guard: 50, want: RemovalHeld},
		"a guard of 0 holds a single one":                             {removals: settledWith(func(r *Removals) { r.Deletions, r.Managed = 1, 100 }), guard: 0, want: RemovalHeld},
		"a guard of 0, allowed":                                       {removals: settledWith(func(r *Removals) { r.AllowedUntil = now.Add(time.Second) }), guard: 0},
		"a guard of 100 holds nothing":                                {removals: settled, guard: 100},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			if status, wait := tc.removals.Hold(delay, tc.guard, now); status != tc.want || wait != tc.wait {
				t.Errorf("%q for %v, want %q for %v", status, wait, tc.want, tc.wait)
			}
		})
	}
}

func TestDeleteOptionsComeFromTheAnnotation(t *testing.T) {
	five, orphan := int64(5), metav1.DeletePropagationOrphan
	tests := map[string]struct {
		annotation string
		want       metav1.DeleteOptions
		malformed  bool
	}{
		"none": {},
		"the propagation policy Orphan is passed on": {annotation: `{"propagationPolicy":"Orphan"}`, want: metav1.DeleteOptions{PropagationPolicy: &orphan}},
		"a grace period":                              {annotation: `{"gracePeriodSeconds":5}`, want: metav1.DeleteOptions{GracePeriodSeconds: &five}},
		"others are not used":                         {annotation: `{"kind":"DeleteOptions","apiVersion":"v1","gracePeriodSeconds":5,"dryRun":["All"],"preconditions":{"uid":"u"},"orphanDependents":true}`, want: metav1.DeleteOptions{GracePeriodSeconds: &five}},
		"an annotation that is not JSON is malformed": {annotation: "Orphan", malformed: true},
		"a text where a number belongs":               {annotation: `{"gracePeriodSeconds":"5"}`, malformed: true},
		"a negative grace period":                     {annotation: `{"gracePeriodSeconds":-1}`, malformed: true},
		"an unknown policy":                           {annotation: `{"propagationPolicy":"Now"}`, malformed: true},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			f := &Federated{}
			if tc.annotation != "" {
				f.Annotations = map[string]string{DeleteOptionAnnotation: tc.annotation}
			}
			got, err := f.DeleteOptions()
			if (err != nil) != tc.malformed {
				t.Error(err)
			}
			assert.Equal(t, "options", tc.want, got)
		})
	}
}

func TestManagedObjectMustBeGoneFirst(t *testing.T) {
	deleted, label := metav1.NewTime(now), map[string]string{ManagedLabel: "true"}
	for name, tc := range map[string]struct {
		live            metav1.ObjectMeta
		isHostNamespace bool
		want            bool
	}{
		"an unlabelled object is not":                                   {live: metav1.ObjectMeta{}},
		"a managed object is":                                           {live: metav1.ObjectMeta{Labels: label}, want: true},
		"a managed object that is being deleted is":                     {live: metav1.ObjectMeta{Labels: label, DeletionTimestamp: &deleted}, want: true},
		"the host's own Namespace is":                                   {live: metav1.ObjectMeta{Labels: label}, isHostNamespace: true, want: true},
		"the host's own Namespace that is being deleted counts as gone": {live: metav1.ObjectMeta{Labels: label, DeletionTimestamp: &deleted}, isHostNamespace: true},
	} {
		t.Run(name, func(t *testing.T) {
			if got := MustBeGone(&tc.live, tc.isHostNamespace); got != tc.want {
				t.Error(got)
			}
		})
	}
}

// TestRepeatsWaitLongerEachTime writes the content a as soon as it may, and says at which seconds.
func TestRepeatsWaitLongerEachTime(t *testing.T) {
	const a, b = 1, 2
	var r Repeats
	at := now
	write := func(content uint64, seconds int, conflict bool) {
		t.Helper()
		if next := r.NextWrite(content); next.After(at) {
			at = next
		}
		if got := r.AddWrite(content, at); got != conflict {
			t.Errorf("conflict: %t", got)
		}
		if got := int(at.Sub(now) / time.Second); got != seconds {
			t.Fatalf("written after %d s, want %d", got, seconds)
		}
	}
	for range 4 { // 33
		write(a, 0, false)
	}
	write(a, 0, true)
	for _, seconds := range []int{30, 90, 210, 450, 930, 1530, 2130} {
		write(a, seconds, true)
	}
	write(b, 2130, false)
	write(a, 2130, false)
	for range 3 {
		write(a, 2130, false)
	}
	write(a, 2130, true)
	at = at.Add(minRepeat + repeatWindow)
	if !r.Idle(at) {
		t.Error("it is remembered for ever")
	}
	write(a, 2760, false)
	for i := range 20 {
		at = at.Add(151 * time.Second)
		write(a, 2760+151*(i+1), false) // five in 604 s
	}
}
