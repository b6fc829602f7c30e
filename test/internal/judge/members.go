// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// Grace is how long the host must have wanted an object without interruption before its deletion in a
// member is wrong. The controller may decide on a federated object that it has read 5 s ago, and its
// request may be on its way for 10 s.
const Grace = 15 * time.Second

// Members judges what managers write in the members of a federation, by the audit logs of the host and of
// the members. Their stores have no common order, so times count: all API servers have one clock. The logs
// need the bodies of writes of federated objects and ConfigMaps. What a member has executed without logging
// its success is not judged, except for deletions.
type Members struct {
	lease      *History
	placements map[target][]placement
	writes     []memberWrite
}

// target is an object in members.
type target struct{ resource, namespace, name string }

// placement is one version of a federated object.
type placement struct {
	revision       uint64
	received, done time.Time
	clusters       []string // none while it is being deleted
	content        int
}

type memberWrite struct {
	target
	cluster, verb, writer string
	revision              uint64
	received, done        time.Time
	content               int // see parseContent
}

// MembersJudgement is the result for a federation.
type MembersJudgement struct {
	// Writes and Deletions are how many were judged. Deletions are writes too.
	Writes, Deletions int
	// Wrong are deletions of what the host wanted, Late are writes after the term, Older are writes of a
	// content older than what the object had.
	Wrong, Late, Older []string
}

// Findings returns everything that is wrong.
func (j *MembersJudgement) Findings() []string { return slices.Concat(j.Wrong, j.Late, j.Older) }

// NewMembers returns a judge. The history is of the managers' Lease alone.
func NewMembers(lease *History) *Members {
	return &Members{lease: lease, placements: map[target][]placement{}}
}

// AddHost adds an event of the host's log, in any order. Members that are not placed by a list of names
// count as not wanted.
func (m *Members) AddHost(e auditv1.Event) error {
	if e.ObjectRef == nil {
		return nil
	}
	if e.ObjectRef.Resource == "leases" {
		return m.lease.AddEvent(e)
	}
	if e.ObjectRef.APIGroup != "types.kubefed.io" || !cluster.AuditWrite(e) {
		return nil
	}
	if e.ResponseObject == nil {
		return fmt.Errorf("the audit log lacks the response to %s %s", e.Verb, e.RequestURI)
	}
	var object struct {
		metav1.PartialObjectMetadata
		Spec struct {
			Template  struct{ Data map[string]string }
			Placement struct{ Clusters []struct{ Name string } }
		}
	}
	if err := json.Unmarshal(e.ResponseObject.Raw, &object); err != nil {
		return err
	}
	revision, err := parseRevision(&object)
	if err != nil {
		return errors.Join(err, errors.New("a federated object that is deleted must have its finalizer"))
	}
	p := placement{revision: revision, received: e.RequestReceivedTimestamp.Time, done: e.StageTimestamp.Time}
	if p.content, err = parseContent(object.Spec.Template.Data); err != nil {
		return err
	}
	for _, c := range object.Spec.Placement.Clusters {
		if object.DeletionTimestamp == nil && e.Verb != "delete" {
			p.clusters = append(p.clusters, c.Name)
		}
	}
	placed := newTarget(e, strings.TrimPrefix(e.ObjectRef.Resource, "federated"), object.Name)
	m.placements[placed] = append(m.placements[placed], p)
	return nil
}

// AddMember adds an event of a member's log: a request of a manager.
func (m *Members) AddMember(member string, e auditv1.Event) error {
	lost := e.ResponseStatus == nil || e.ResponseStatus.Code >= 499
	if e.ObjectRef == nil || !cluster.AuditWrite(e) && (e.Verb != "delete" || !lost) {
		return nil
	}
	w := memberWrite{target: newTarget(e, e.ObjectRef.Resource, e.ObjectRef.Name), cluster: member, verb: e.Verb, writer: Process(e.UserAgent),
		received: e.RequestReceivedTimestamp.Time, done: e.StageTimestamp.Time}
	if w.resource == "configmaps" && (w.verb == "create" || w.verb == "update") {
		if e.ResponseObject == nil {
			return fmt.Errorf("the audit log lacks the response to %s %s", e.Verb, e.RequestURI)
		}
		var object struct {
			metav1.PartialObjectMetadata
			Data map[string]string
		}
		err := json.Unmarshal(e.ResponseObject.Raw, &object)
		if err == nil {
			w.revision, err = parseRevision(&object)
		}
		if err == nil {
			w.content, err = parseContent(object.Data)
		}
		if err != nil {
			return err
		}
		w.name = object.Name
	}
	m.writes = append(m.writes, w)
	return nil
}

// parseContent returns the number in a ConfigMap that grows with each change; 0 if there is none.
func parseContent(data map[string]string) (int, error) {
	if data["content"] == "" {
		return 0, nil
	}
	return strconv.Atoi(data["content"])
}

// newTarget returns the object in members. Its name is not in the URL of a POST.
func newTarget(e auditv1.Event, resource, name string) target {
	if resource == "namespaces" {
		return target{resource: resource, name: name}
	}
	return target{resource, e.ObjectRef.Namespace, name}
}

// Judge judges everything so far.
func (m *Members) Judge() *MembersJudgement {
	for _, versions := range m.placements {
		slices.SortFunc(versions, func(a, b placement) int { return cmp.Compare(a.revision, b.revision) })
	}
	slices.SortFunc(m.writes, func(a, b memberWrite) int {
		return cmp.Or(cmp.Compare(a.cluster, b.cluster), cmp.Compare(a.revision, b.revision))
	})
	terms := m.lease.Judge().Acquisitions
	j := &MembersJudgement{Writes: len(m.writes)}
	type key struct {
		cluster string
		target
	}
	newest := map[key]memberWrite{}
	for _, w := range m.writes {
		if w.verb == "delete" {
			j.Deletions++
			if m.isWanted(w) {
				j.Wrong = append(j.Wrong, w.String()+": the host wants it")
			}
		}
		if violation := termEnd(terms, w); violation != "" {
			j.Late = append(j.Late, w.String()+": "+violation)
		}
		newestWrite := newest[key{w.cluster, w.target}]
		if w.content < newestWrite.content && w.content > 0 {
			j.Older = append(j.Older, fmt.Sprintf("%v: it had content %d", w, newestWrite.content))
		}
		if w.content > newestWrite.content {
			newest[key{w.cluster, w.target}] = w
		}
	}
	return j
}

// Delays returns how long it took from each change to a content after the given one on the host until the
// member had this content or a later one, sorted. Unfinished is how many it never had.
func (m *Members) Delays(member string, content int) (delays []time.Duration, unfinished int) {
	m.Judge() // sorts
	for object, placements := range m.placements {
		last := content
		for _, p := range placements {
			if p.content <= last || !slices.Contains(p.clusters, member) {
				continue
			}
			last = p.content
			written := slices.IndexFunc(m.writes, func(w memberWrite) bool {
				return w.cluster == member && w.target == object && w.content >= p.content
			})
			if written < 0 {
				unfinished++
				continue
			}
			delays = append(delays, m.writes[written].done.Sub(p.done))
		}
	}
	slices.Sort(delays)
	return delays, unfinished
}

// isWanted reports whether the host wants an object from a Grace before its deletion until afterwards.
func (m *Members) isWanted(w memberWrite) bool {
	begin, end := w.received.Add(-Grace), w.done
	wants := func(object target) bool {
		var since time.Time // zero while it is not wanted
		for _, p := range m.placements[object] {
			switch placed := slices.Contains(p.clusters, w.cluster); {
			case placed && since.IsZero():
				since = p.done
			case !placed && !since.IsZero():
				if since.Before(begin) && p.received.After(end) {
					return true
				}
				since = time.Time{}
			}
		}
		return !since.IsZero() && since.Before(begin)
	}
	return wants(w.target) && (w.namespace == "" || wants(target{resource: "namespaces", name: w.namespace}))
}

// termEnd returns why a write came after the term of the process; "" if it did not.
func termEnd(terms []Acquisition, w memberWrite) string {
	i := slices.IndexFunc(terms, func(a Acquisition) bool { return a.Process == w.writer })
	switch {
	case i < 0:
		return "it never led"
	case i+1 < len(terms) && terms[i+1].Time.Before(w.received):
		return fmt.Sprintf("%s leads since %s", terms[i+1].Process, clock(terms[i+1].Time))
	}
	return ""
}

// String returns the whole write on one line.
func (w memberWrite) String() string {
	return fmt.Sprintf("%s: %s of %s %s/%s by %s, received %s, done %s, content %d", w.cluster, w.verb, w.resource, w.namespace, w.name, w.writer,
		clock(w.received), clock(w.done), w.content)
}
