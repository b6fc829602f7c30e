// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"encoding/json"
	"fmt"
	"slices"
	"sync"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// Rollouts collects the versions of workloads and finds those that changed the pod template. The
// audit log shows who wrote a version. A request may be executed without being logged as
// successful, so versions that a watch has shown complete the log. Its methods may be called from
// several goroutines.
type Rollouts struct {
	mu       sync.Mutex
	versions map[string]map[uint64]Template // by object and revision
}

// Template is a version of a workload.
type Template struct {
	Revision uint64
	// Writer is the Pod whose manager wrote it, or else the program in the user agent; empty if only a
	// watch has shown it.
	Writer string
	corev1.PodTemplateSpec

	uid  types.UID
	text string // the template as text, to compare
}

// NewRollouts returns an empty collection.
func NewRollouts() *Rollouts { return &Rollouts{versions: map[string]map[uint64]Template{}} }

// AddEvent adds an event of the audit log, in any order. Only successful patches of apps and Argo
// Rollouts count, which are logged with their responses.
func (r *Rollouts) AddEvent(e auditv1.Event) error {
	if e.ObjectRef == nil || e.ObjectRef.Subresource != "" || e.Verb != "patch" || !cluster.AuditWrite(e) ||
		e.ObjectRef.APIGroup != appsv1.GroupName && e.ObjectRef.APIGroup != "argoproj.io" {
		return nil
	}
	if e.ResponseObject == nil {
		return fmt.Errorf("the audit log lacks the response to %s %s", e.Verb, e.RequestURI)
	}
	writer := cluster.AuditPod(e)
	if writer == "" {
		writer = Process(e.UserAgent)
	}
	return r.add(e.ObjectRef.Resource+"/"+e.ObjectRef.Namespace+"/"+e.ObjectRef.Name, e.ResponseObject.Raw, writer)
}

// AddObject adds a version of RESOURCE/NAMESPACE/NAME that the test has seen otherwise.
func (r *Rollouts) AddObject(object string, version any) error {
	raw, err := json.Marshal(version)
	if err != nil {
		return err
	}
	return r.add(object, raw, "")
}

func (r *Rollouts) add(object string, raw []byte, writer string) error {
	var o struct {
		metav1.ObjectMeta `json:"metadata"`

		Spec struct {
			Template corev1.PodTemplateSpec `json:"template"`
		} `json:"spec"`
	}
	if err := json.Unmarshal(raw, &o); err != nil {
		return fmt.Errorf("version of %s: %w", object, err)
	}
	revision, err := parseRevision(&o.ObjectMeta)
	if err != nil {
		return fmt.Errorf("version of %s: %w", object, err)
	}
	// The template is decoded and encoded, so that all versions have the same format.
	text, err := json.Marshal(o.Spec.Template)
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.versions[object] == nil {
		r.versions[object] = map[uint64]Template{}
	}
	if writer == "" {
		writer = r.versions[object][revision].Writer
	}
	r.versions[object][revision] = Template{Revision: revision, Writer: writer, PodTemplateSpec: o.Spec.Template, uid: o.UID, text: string(text)}
	return nil
}

// Knows reports whether the revision of the object is known.
func (r *Rollouts) Knows(object string, revision uint64) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	_, ok := r.versions[object][revision]
	return ok
}

// Objects returns the sorted names of the objects with a known version.
func (r *Rollouts) Objects() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	var names []string
	for name := range r.versions {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Find returns the versions of RESOURCE/NAMESPACE/NAME, in order, whose pod template differs from the
// previous version's. The first version of an object is not a rollout.
func (r *Rollouts) Find(object string) []Template {
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []Template
	var previous Template
	for _, v := range sorted(r.versions[object]) {
		if v.uid == previous.uid && v.text != previous.text {
			list = append(list, v)
		}
		previous = v
	}
	return list
}
