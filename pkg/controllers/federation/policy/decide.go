// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Action is what to do with an object in a cluster.
type Action int

// The actions.
const (
	// Nothing is to be done: for instance, an object that is not wanted is gone, or counts as gone.
	Nothing Action = iota
	// Wait until the cluster has deleted the object: WaitingForRemoval.
	Wait
	// Create creates the object. If one exists already, AdoptionRefusal decides.
	Create
	// Update reads the object, renders it and, if the result differs, writes it with its resourceVersion.
	Update
	// Remove reads the object, and ActionToRemove decides.
	Remove
	// Unlabel takes the managed label off the object.
	Unlabel
)

// State is what is known of a federated object and its object in a cluster.
type State struct {
	// Exists is set if the federated object exists, Wanted if it is placed in the cluster and is not being
	// deleted.
	Exists, Wanted bool
	// KeepUnwanted is set if the cluster keeps an object that is not wanted: the federated object is an orphan,
	// its CustomResourceDefinition is being deleted, or it is a Namespace that is never propagated.
	KeepUnwanted bool
	// Live is the managed object in the cache, or nil. IsHostNamespace is set if it is the host's own Namespace.
	Live            *LiveObject
	IsHostNamespace bool
	// WrittenVersion is the version of the object after the last write of the present content, or "".
	WrittenVersion string
	// Rendered is what the digest of the federated object says of the cluster.
	Rendered OverrideDigest
	// LiveAnnotations is the hash of the annotations after the last write or read of this process, or nil.
	LiveAnnotations *uint64
}

// Decide returns what to do.
func Decide(s State) Action {
	switch live := s.Live; {
	case live != nil && live.Deleting && s.IsHostNamespace:
		return Nothing // the Namespace and its federated object would wait for each other
	case live != nil && live.Deleting:
		return Wait
	case s.Wanted && live == nil:
		return Create
	case live == nil:
		return Nothing
	case s.Wanted:
		return s.decideWanted()
	case s.Exists && !s.IsHostNamespace && !s.KeepUnwanted:
		return Remove
	}
	return Unlabel
}

// decideWanted decides on an object that is wanted and there.
func (s State) decideWanted() Action {
	live := s.Live
	switch {
	case live.Version != s.WrittenVersion, strings.HasPrefix(live.Version, "gen:") && live.Labels != s.Rendered.Labels,
		s.Rendered.Annotations && (s.LiveAnnotations == nil || *s.LiveAnnotations != live.Annotations):
		return Update
	}
	return Nothing
}

// AdoptionRefusal returns the status of a cluster in which a create has found an object that must stay as it
// is, which is not tried again, or "". An object with the managed label is ours, and the cache was late.
func AdoptionRefusal(live metav1.Object, isHostNamespace bool, c Config) (status string) {
	switch label := live.GetLabels()[ManagedLabel]; {
	case label == "false":
		return ManagedLabelFalse
	case label != "true" && !isHostNamespace && !c.AdoptResources:
		return AlreadyExists
	}
	return ""
}

// ActionToRemove returns what to do with an object that is not wanted and was just read: a cache may be
// behind, and must not cause a deletion.
func ActionToRemove(t *TypeConfig, live metav1.Object) Action {
	switch {
	case live.GetLabels()[ManagedLabel] != "true":
		return Nothing
	case live.GetDeletionTimestamp() != nil:
		return Wait
	case t.IsNamespace() && live.GetAnnotations()[AdoptedAnnotation] == "true":
		return Unlabel
	}
	return Remove
}

// After freeRepeats writes of the same content within repeatWindow, the next write waits for minRepeat, and
// each further one for twice as long, up to maxRepeat.
const (
	repeatWindow = 10 * time.Minute
	freeRepeats  = 5
	minRepeat    = 30 * time.Second
	maxRepeat    = 10 * time.Minute
)

// Repeats are the writes of the same content to an object. Otherwise somebody who reverts each write would
// cause writes without end. The zero value has no writes.
type Repeats struct {
	content uint64
	// times has the times of the last freeRepeats writes.
	times []time.Time
	wait  time.Duration
}

// NextWrite returns when the content may be written; the zero time is at once.
func (r *Repeats) NextWrite(content uint64) time.Time {
	if content != r.content || r.wait == 0 {
		return time.Time{}
	}
	return r.times[len(r.times)-1].Add(r.wait)
}

// AddWrite counts a write. It reports whether the next one of the same content has to wait.
func (r *Repeats) AddWrite(content uint64, now time.Time) bool {
	if content != r.content || r.Idle(now) {
		*r = Repeats{content: content}
	}
	r.times = append(r.times[max(0, len(r.times)-freeRepeats+1):], now)
	switch {
	case r.wait > 0:
		r.wait = min(2*r.wait, maxRepeat)
	case len(r.times) == freeRepeats && now.Sub(r.times[0]) < repeatWindow:
		r.wait = minRepeat
	}
	return r.wait > 0
}

// Idle reports whether the writes are so long ago that they need not be remembered.
func (r *Repeats) Idle(now time.Time) bool {
	return len(r.times) == 0 || now.Sub(r.times[len(r.times)-1]) >= r.wait+repeatWindow
}
