// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
)

// bookmarkPeriod is how often a watch gets a bookmark, as from the API server.
const bookmarkPeriod = time.Minute

// watch serves a watch until the client ends it or its time is over.
func (s *Server) watch(w http.ResponseWriter, c call) error {
	next, expired, err := s.begin(c)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out := &watchStream{c: c, json: json.NewEncoder(w), flush: w.(http.Flusher).Flush}
	initial := c.options.SendInitialEvents != nil && *c.options.SendInitialEvents
	if initial || c.options.ResourceVersion == "" || c.options.ResourceVersion == "0" {
		s.mu.Lock()
		objects, version := s.matching(c.resource, c.selector), s.version
		next = len(s.log)
		s.mu.Unlock()
		for _, obj := range objects {
			out.send(watch.Added, obj)
		}
		if initial {
			out.bookmark(version, map[string]string{metav1.InitialEventsAnnotationKey: "true"})
		}
	}
	out.flush()
	bookmarks := time.NewTicker(bookmarkPeriod)
	defer bookmarks.Stop()
	var over <-chan time.Time
	if t := c.options.TimeoutSeconds; t != nil && *t > 0 {
		timer := time.NewTimer(time.Duration(*t) * time.Second)
		defer timer.Stop()
		over = timer.C
	}
	for {
		s.mu.Lock()
		events, version, changed, lag := s.log[next:], s.version, s.changed, s.timing.lag(c.Resource.Resource)
		next = len(s.log)
		s.mu.Unlock()
		for _, e := range events {
			if out.c.selector.covers(c.resource, e.key) {
				// Go 1.26's race detector crashes when two goroutines of a bubble receive from timers that have
				// expired already.
				if left := time.Until(e.at.Add(lag)); left > 0 {
					<-time.After(left)
				}
				out.change(e)
				out.flush()
			}
		}
		out.flush()
		select {
		case <-changed:
		case <-bookmarks.C:
			if c.options.AllowWatchBookmarks {
				out.bookmark(version, nil)
			}
		case <-over:
			return nil
		case <-expired:
			return nil
		case <-c.ctx:
			return nil
		}
	}
}

// begin returns the position in the log at which the watch begins, and the channel of Expire.
func (s *Server) begin(c call) (next int, expired <-chan struct{}, err error) {
	version := 0
	if v := c.options.ResourceVersion; v != "" {
		if version, err = strconv.Atoi(v); err != nil {
			return 0, nil, apierrors.NewBadRequest(fmt.Sprintf("invalid resource version %q", v))
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if version > 0 && version < s.oldest {
		return 0, nil, apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", version, s.oldest))
	}
	next = len(s.log)
	for next > 0 && s.log[next-1].version > version {
		next--
	}
	return next, s.expired, nil
}

// watchStream writes events.
type watchStream struct {
	c     call
	json  *json.Encoder
	flush func()
}

// change sends a change as the selector sees it: an object that no longer matches is deleted.
func (w *watchStream) change(e change) {
	was := e.before != nil && w.c.selector.matches(e.before)
	is := e.kind != watch.Deleted && w.c.selector.matches(e.after)
	shown := inVersion(e.after, w.c.resource)
	switch {
	case is && was:
		w.send(watch.Modified, shown)
	case is:
		w.send(watch.Added, shown)
	case was && e.kind == watch.Deleted:
		w.send(watch.Deleted, shown)
	case was:
		last := inVersion(e.before, w.c.resource).DeepCopy()
		last.SetResourceVersion(e.after.GetResourceVersion())
		w.send(watch.Deleted, last)
	}
}

func (w *watchStream) send(kind watch.EventType, obj *object) {
	// A client that is gone ends the watch by its context.
	_ = w.json.Encode(map[string]any{"type": kind, "object": w.c.shown(obj).Object})
}

func (w *watchStream) bookmark(version int, annotations map[string]string) {
	obj := &object{}
	obj.SetGroupVersionKind(w.c.resource.gvk())
	obj.SetResourceVersion(strconv.Itoa(version))
	obj.SetAnnotations(annotations)
	w.send(watch.Bookmark, obj)
}

// selector says which objects a list or a watch is about.
type selector struct {
	namespace string
	labels    labels.Selector
	fields    fields.Selector
}

// selectable are the fields of built-in resources that a fieldSelector may name, besides
// metadata.name and metadata.namespace, as in the API server.
var selectable = map[schema.GroupResource][]string{
	{Resource: "secrets"}:              {"type"},
	{Resource: "namespaces"}:           {"status.phase"},
	{Resource: "nodes"}:                {"spec.unschedulable"},
	{Resource: "pods"}:                 {"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase", "status.podIP"},
	{Resource: "events"}:               {"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid", "reason", "type"},
	{Resource: "services"}:             {"spec.clusterIP", "spec.type"},
	{Group: "batch", Resource: "jobs"}: {"status.successful"},
	certificateRequests:                {"spec.signerName"},
}

func newSelector(gr schema.GroupResource, opts metav1.ListOptions) (*selector, error) {
	l, err := labels.Parse(opts.LabelSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	f, err := fields.ParseSelector(opts.FieldSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	for _, r := range f.Requirements() {
		known := r.Field == "metadata.name" || r.Field == "metadata.namespace"
		for _, name := range selectable[gr] {
			known = known || name == r.Field
		}
		if !known {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("field label not supported: %s", r.Field))
		}
	}
	return &selector{labels: l, fields: f}, nil
}

func (s *selector) covers(r *resource, k key) bool {
	return k.group == r.Group && k.kind == r.kind && (s.namespace == "" || s.namespace == k.namespace)
}

func (s *selector) matches(obj *object) bool {
	return s.labels.Matches(labels.Set(obj.GetLabels())) && s.fields.Matches(objectFields{obj})
}

// objectFields are the fields of an object by their paths.
type objectFields struct{ *object }

func (f objectFields) Has(string) bool { return true }

func (f objectFields) Get(path string) string {
	value, found, err := unstructured.NestedFieldNoCopy(f.Object, strings.Split(path, ".")...)
	if !found || err != nil {
		return ""
	}
	return fmt.Sprint(value)
}
