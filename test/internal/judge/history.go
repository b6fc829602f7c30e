// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
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

// History collects what has happened to the Lease and what was written. Its methods may be called
// from several goroutines.
type History struct {
	// Fenced is set if the fence in the API server is in force all the time.
	Fenced bool

	lease types.NamespacedName
	// isReplica reports whether a process elects, by the name of its program.
	isReplica func(process string) bool
	// annotation is changed by every write of a leader.
	annotation string

	mu        sync.Mutex
	logged    record
	watched   record
	processes map[string]string // by identity
	// attempts holds, for each value of the annotation, the processes whose requests to write it
	// had no certain outcome.
	attempts map[attempt]map[string]bool
}

// attempt is what a request would have written, or what a version of an object contains.
type attempt struct{ object, value string }

type record struct {
	versions map[uint64]LeaseVersion
	writes   map[uint64]Write
}

func newRecord() record {
	return record{versions: map[uint64]LeaseVersion{}, writes: map[uint64]Write{}}
}

// leaseField is a field that every write of a replica to the Lease changes.
const leaseField = `"f:renewTime"`

// New returns an empty history. Writes of replicas to anything but Leases and Events are a leader's.
// Each must change the annotation to a value that no other process writes. The value shows whose write it
// was, if the log does not.
func New(lease types.NamespacedName, annotation string, isReplica func(process string) bool) *History {
	return &History{lease: lease, isReplica: isReplica, annotation: annotation, logged: newRecord(), watched: newRecord(),
		processes: map[string]string{}, attempts: map[attempt]map[string]bool{}}
}

// Process returns the name of the program with which a user agent begins.
func Process(userAgent string) string {
	process, _, _ := strings.Cut(userAgent, "/")
	return process
}

// AddEvent adds an event of the audit log, in any order.
func (h *History) AddEvent(e auditv1.Event) error {
	if e.ObjectRef == nil {
		return nil
	}
	isLease := e.ObjectRef.Resource == "leases"
	isManagers := isLease && e.ObjectRef.Namespace == h.lease.Namespace && e.ObjectRef.Name == h.lease.Name
	switch replica := h.isReplica(Process(e.UserAgent)); {
	case isLease && (!isManagers || e.Verb == "delete"): // only a watch shows the revision of a deletion
		return nil
	case !isLease && (!replica || e.ObjectRef.Resource == "events"):
		return nil
	case !cluster.AuditWrite(e):
		h.addAttempt(e)
		return nil
	case e.ResponseObject == nil:
		return fmt.Errorf("the audit log lacks the response to %s %s", e.Verb, e.RequestURI)
	case isLease:
		return h.addLeaseWrite(e)
	}
	return h.addWrite(e)
}

func (h *History) addLeaseWrite(e auditv1.Event) error {
	var lease coordinationv1.Lease
	if err := json.Unmarshal(e.ResponseObject.Raw, &lease); err != nil {
		return err
	}
	v, err := newLeaseVersion(&lease, Process(e.UserAgent), e.StageTimestamp.Time)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.logged.versions[v.Revision] = v
	if h.isReplica(v.Writer) && v.Holder != "" {
		h.processes[v.Holder] = v.Writer
	}
	return nil
}

func (h *History) addWrite(e auditv1.Event) error {
	var object metav1.PartialObjectMetadata
	if err := json.Unmarshal(e.ResponseObject.Raw, &object); err != nil {
		return err
	}
	revision, err := parseRevision(&object)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.logged.writes[revision] = Write{Revision: revision, Object: objectName(e), Writer: Process(e.UserAgent),
		Received: e.RequestReceivedTimestamp.Time, Done: e.StageTimestamp.Time}
	return nil
}

// addAttempt adds a request that may have been executed although it got no successful response: its
// client has disconnected, or the API server has timed out.
func (h *History) addAttempt(e auditv1.Event) {
	var object metav1.PartialObjectMetadata
	certain := e.ResponseStatus != nil && e.ResponseStatus.Code >= 400 && e.ResponseStatus.Code < 499
	if certain || e.RequestObject == nil || json.Unmarshal(e.RequestObject.Raw, &object) != nil {
		return
	}
	key := attempt{objectName(e), object.Annotations[h.annotation]}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.attempts[key] == nil {
		h.attempts[key] = map[string]bool{}
	}
	h.attempts[key][Process(e.UserAgent)] = true
}

func objectName(e auditv1.Event) string { return e.ObjectRef.Resource + "/" + e.ObjectRef.Name }

// AddLease adds a version of the Lease that a watch has shown.
func (h *History) AddLease(lease *coordinationv1.Lease, deleted bool) error {
	if lease.Namespace != h.lease.Namespace || lease.Name != h.lease.Name {
		return nil
	}
	v, err := newLeaseVersion(lease, fieldOwner(lease, leaseField), time.Now())
	if err != nil {
		return err
	}
	v.Deleted = deleted
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watched.versions[v.Revision] = v
	return nil
}

// AddObject adds a version of an object that a watch has shown. Without the annotation it is not
// from a replica and does not count.
func (h *History) AddObject(resource string, object metav1.Object) error {
	value := object.GetAnnotations()[h.annotation]
	if value == "" {
		return nil
	}
	revision, err := parseRevision(object)
	if err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.watched.writes[revision] = Write{Revision: revision, Object: resource + "/" + object.GetName(), Done: time.Now(), value: value}
	return nil
}

// attribute finds out which process made a write that only a watch has shown.
func (h *History) attribute(w Write) Write {
	processes := slices.Sorted(maps.Keys(h.attempts[attempt{w.Object, w.value}]))
	w.Writer = strings.Join(processes, " or ")
	return w
}

// Judge judges everything so far.
func (h *History) Judge() *Judgement {
	h.mu.Lock()
	defer h.mu.Unlock()
	versions, writes := maps.Clone(h.watched.versions), maps.Clone(h.watched.writes)
	maps.Copy(versions, h.logged.versions) // the log takes precedence
	for revision, w := range writes {
		writes[revision] = h.attribute(w)
	}
	maps.Copy(writes, h.logged.writes)
	result := judge(sorted(versions), sorted(writes), h.processes, h.Fenced)
	result.Unlogged = len(writes) - len(h.logged.writes)
	return result
}

// Around returns a readable list of what happened shortly before and after a revision.
func (h *History) Around(revision uint64) string {
	const span = 60 // revisions
	h.mu.Lock()
	defer h.mu.Unlock()
	lines := map[uint64]string{}
	for source, r := range map[string]record{"watch": h.watched, "log": h.logged} {
		for at, v := range r.versions {
			lines[at] = fmt.Sprintf("%d %s lease: written by %s, holder %q, transitions %d, deleted %t (%s)", at, clock(v.Time), v.Writer, v.Holder, v.Transitions, v.Deleted, source)
		}
		for at, w := range r.writes {
			lines[at] = fmt.Sprintf("%d %s %s: written by %s, received %s (%s)", at, clock(w.Done), w.Object, w.Writer, clock(w.Received), source)
		}
	}
	maps.DeleteFunc(lines, func(at uint64, _ string) bool { return at+span < revision || at > revision+span })
	return strings.Join(sorted(lines), "\n")
}

func newLeaseVersion(lease *coordinationv1.Lease, writer string, at time.Time) (LeaseVersion, error) {
	revision, err := parseRevision(lease)
	return LeaseVersion{
		Revision: revision, UID: lease.UID, Writer: writer, Time: at,
		Holder: ptr.Deref(lease.Spec.HolderIdentity, ""), Transitions: ptr.Deref(lease.Spec.LeaseTransitions, 0),
		Duration: time.Duration(ptr.Deref(lease.Spec.LeaseDurationSeconds, 0)) * time.Second,
	}, err
}

func parseRevision(object metav1.Object) (uint64, error) {
	revision, err := strconv.ParseUint(object.GetResourceVersion(), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("resourceVersion of %s: %w", object.GetName(), err)
	}
	return revision, nil
}

// fieldOwner returns who has last changed a field.
func fieldOwner(object metav1.Object, field string) string {
	for _, entry := range object.GetManagedFields() {
		if entry.FieldsV1 != nil && strings.Contains(entry.FieldsV1.GetRawString(), field) {
			return entry.Manager
		}
	}
	return ""
}
