// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/json"
	"fmt"
	"maps"
	"strconv"
	"strings"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// History collects what has happened to the Lease and what was written. Its methods may be called from several
// goroutines.
type History struct {
	lease types.NamespacedName
	// isReplica tells by the name of its program whether a process is one that elects.
	isReplica func(process string) bool
	// field is one that every write of a leader changes, as managedFields name it.
	field string

	mu        sync.Mutex
	logged    record
	watched   record
	processOf map[string]string // by identity
}

type record struct {
	versions map[uint64]LeaseVersion
	writes   map[uint64]Write
}

func newRecord() record {
	return record{versions: map[uint64]LeaseVersion{}, writes: map[uint64]Write{}}
}

// leaseField is one that every write of a replica to the Lease changes.
const leaseField = `"f:renewTime"`

// New returns an empty history. Writes of replicas to anything but Leases and Events are those of a leader. What the log
// does not tell of one, the owner of the annotation in managedFields does: every write must change it.
func New(lease types.NamespacedName, annotation string, isReplica func(process string) bool) *History {
	return &History{lease: lease, isReplica: isReplica, field: strconv.Quote("f:" + annotation),
		logged: newRecord(), watched: newRecord(), processOf: map[string]string{}}
}

// Process is the name of the program that a user agent begins with.
func Process(userAgent string) string {
	process, _, _ := strings.Cut(userAgent, "/")
	return process
}

// AddEvent takes note of an event of the audit log, in any order.
func (h *History) AddEvent(e auditv1.Event) error {
	if !cluster.AuditWrite(e) || e.ObjectRef == nil || e.ObjectRef.Resource == "events" {
		return nil
	}
	isLease := e.ObjectRef.Resource == "leases"
	if isLease && (e.ObjectRef.Namespace != h.lease.Namespace || e.ObjectRef.Name != h.lease.Name) ||
		!isLease && !h.isReplica(Process(e.UserAgent)) || isLease && e.Verb == "delete" { // a deletion's revision is known to a watch only
		return nil
	}
	if e.ResponseObject == nil {
		return fmt.Errorf("the audit log lacks the answer of %s %s", e.Verb, e.RequestURI)
	}
	if isLease {
		var lease coordinationv1.Lease
		if err := json.Unmarshal(e.ResponseObject.Raw, &lease); err != nil {
			return err
		}
		v, err := versionOf(&lease, Process(e.UserAgent), e.StageTimestamp.Time)
		if err != nil {
			return err
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		h.logged.versions[v.Revision] = v
		if h.isReplica(v.By) && v.Holder != "" {
			h.processOf[v.Holder] = v.By
		}
		return nil
	}
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(e.ResponseObject.Raw, &object); err != nil {
		return err
	}
	revision, err := revisionOf(&object)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.logged.writes[revision] = Write{Revision: revision, Object: e.ObjectRef.Resource + "/" + e.ObjectRef.Name, By: Process(e.UserAgent),
		Received: e.RequestReceivedTimestamp.Time, Done: e.StageTimestamp.Time}
	return nil
}

// AddLease takes note of a version of the Lease that a watch has shown.
func (h *History) AddLease(lease *coordinationv1.Lease, deleted bool) error {
	if lease.Namespace != h.lease.Namespace || lease.Name != h.lease.Name {
		return nil
	}
	v, err := versionOf(lease, owner(lease, leaseField), time.Now())
	if err != nil {
		return err
	}
	v.Deleted = deleted
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watched.versions[v.Revision] = v
	return nil
}

// AddObject takes note of a version of an object that a watch has shown, if a replica has written it.
func (h *History) AddObject(resource string, object metav1.Object) error {
	by := owner(object, h.field)
	if !h.isReplica(by) {
		return nil
	}
	revision, err := revisionOf(object)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watched.writes[revision] = Write{Revision: revision, Object: resource + "/" + object.GetName(), By: by, Done: time.Now()}
	return nil
}

// Judge judges everything so far.
func (h *History) Judge() *Judgement {
	h.mu.Lock()
	defer h.mu.Unlock()
	versions, writes := maps.Clone(h.watched.versions), maps.Clone(h.watched.writes)
	maps.Copy(versions, h.logged.versions) // the log knows better
	maps.Copy(writes, h.logged.writes)
	result := judge(sorted(versions), sorted(writes), h.processOf)
	result.Unlogged = len(writes) - len(h.logged.writes)
	return result
}

// Around tells what happened shortly before and after a revision, for people.
func (h *History) Around(revision uint64) string {
	const span = 60 // revisions
	h.mu.Lock()
	defer h.mu.Unlock()
	lines := map[uint64]string{}
	for source, r := range map[string]record{"watch": h.watched, "log": h.logged} {
		for at, v := range r.versions {
			lines[at] = fmt.Sprintf("%d %s lease: written by %s, holder %q, transitions %d, deleted %t (%s)", at, clock(v.Time), v.By, v.Holder, v.Transitions, v.Deleted, source)
		}
		for at, w := range r.writes {
			lines[at] = fmt.Sprintf("%d %s %s: written by %s, received %s (%s)", at, clock(w.Done), w.Object, w.By, clock(w.Received), source)
		}
	}
	maps.DeleteFunc(lines, func(at uint64, _ string) bool { return at+span < revision || at > revision+span })
	return strings.Join(sorted(lines), "\n")
}

func versionOf(lease *coordinationv1.Lease, by string, at time.Time) (LeaseVersion, error) {
	revision, err := revisionOf(lease)
	return LeaseVersion{
		Revision: revision, UID: lease.UID, By: by, Time: at,
		Holder: ptr.Deref(lease.Spec.HolderIdentity, ""), Transitions: ptr.Deref(lease.Spec.LeaseTransitions, 0),
	}, err
}

func revisionOf(object metav1.Object) (uint64, error) {
	revision, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("resourceVersion of %s: %w", object.GetName(), err)
	}
	return revision, nil
}

// owner is who has last changed a field.
func owner(object metav1.Object, field string) string {
	for _, entry := range object.GetManagedFields() {
		if entry.FieldsV1 != nil && strings.Contains(string(entry.FieldsV1.Raw), field) {
			return entry.Manager
		}
	}
	return ""
}
