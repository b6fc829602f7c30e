// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Status is what /debug/informers shows.
type Status struct {
	Started        bool             `json:"started"`
	CacheMutations int64            `json:"cacheMutations"`
	Resources      []ResourceStatus `json:"resources"`
}

// ResourceStatus is the state of one informer. An age is nil as long as there is nothing to count
// from.
type ResourceStatus struct {
	Group            string           `json:"group"`
	Version          string           `json:"version"`
	Resource         string           `json:"resource"`
	For              []string         `json:"for"`
	Form             string           `json:"form"`
	FieldSelector    string           `json:"fieldSelector,omitempty"`
	Synced           bool             `json:"synced"`
	Absent           bool             `json:"absent,omitempty"`
	Objects          int              `json:"objects"`
	ApproximateBytes int64            `json:"approximateBytes"`
	ResourceVersion  string           `json:"resourceVersion"`
	LastActivityAge  *metav1.Duration `json:"lastActivityAge,omitempty"`
	LastEventAge     *metav1.Duration `json:"lastEventAge,omitempty"`
	LastBookmarkAge  *metav1.Duration `json:"lastBookmarkAge,omitempty"`
	Lists            int64            `json:"lists"`
	Relists          int64            `json:"relists"`
	StreamedLists    int64            `json:"streamedLists"`
	Watches          int64            `json:"watches"`
	Events           int64            `json:"events"`
	Bookmarks        int64            `json:"bookmarks"`
	Failures         int64            `json:"failures"`
	LastFailure      *FailureStatus   `json:"lastFailure,omitempty"`
	Problem          string           `json:"problem,omitempty"`
}

// FailureStatus is the last series of failed requests with one verb.
type FailureStatus struct {
	Verb  string      `json:"verb"`
	Error string      `json:"error"`
	Count int64       `json:"count"`
	Since metav1.Time `json:"since"`
	Last  metav1.Time `json:"last"`
}

// Status returns the present state of all informers. With sizes, it walks all cached objects to
// compute ApproximateBytes.
func (f *Factory) Status(sizes bool) Status {
	s := Status{Started: f.started(), Resources: make([]ResourceStatus, 0, len(f.resources))}
	if f.mutations != nil {
		s.CacheMutations = f.mutations.count()
	}
	for _, r := range f.resources {
		s.Resources = append(s.Resources, r.status(sizes))
	}
	return s
}

// status returns what is known of the requests of a plan.
func (p *plan) status(state *state, synced bool) ResourceStatus {
	s := ResourceStatus{
		Group:         p.resource.Group,
		Version:       p.resource.Version,
		Resource:      p.resource.Resource,
		For:           p.controllers(),
		Form:          p.form(),
		FieldSelector: p.fieldSelector,
		Synced:        synced,
	}
	if err := state.problem(synced); err != nil {
		s.Problem = err.Error()
	}
	state.fill(&s)
	return s
}

func (r *resource) status(sizes bool) ResourceStatus {
	s := r.plan.status(r.state, r.informer.HasSynced())
	if sizes {
		for _, obj := range r.informer.GetStore().List() {
			s.ApproximateBytes += int64(sizeOf(obj))
		}
	}
	return s
}

func (s *state) fill(out *ResourceStatus) {
	s.mu.Lock()
	defer s.mu.Unlock()
	out.Absent, out.Objects = s.absent, s.objects
	out.ResourceVersion = s.resourceVersion
	out.LastEventAge = s.age(s.lastEvent)
	out.LastBookmarkAge = s.age(s.lastBookmark)
	out.LastActivityAge = s.age(latest(s.lastEvent, s.lastBookmark, s.lastList))
	out.Lists, out.Relists, out.StreamedLists = s.lists, max(0, s.lists-1), s.streamed
	out.Watches, out.Events, out.Bookmarks, out.Failures = s.watches, s.events, s.bookmarks, s.failures
	if f := s.lastFailure; f != nil {
		out.LastFailure = &FailureStatus{Verb: f.verb, Error: f.err.Error(), Count: f.count,
			Since: metav1.NewTime(f.since), Last: metav1.NewTime(f.last)}
	}
}

func (s *state) age(t time.Time) *metav1.Duration {
	if t.IsZero() {
		return nil
	}
	return &metav1.Duration{Duration: s.clock.Since(t).Round(time.Millisecond)}
}

func latest(times ...time.Time) time.Time {
	var last time.Time
	for _, t := range times {
		if t.After(last) {
			last = t
		}
	}
	return last
}

// sizeOf estimates how many bytes of heap a cached object holds. API types know the size of their
// encoding. Decoded, they take about three times as much, mostly for pointers and headers.
func sizeOf(obj any) int {
	switch o := obj.(type) {
	case *Object:
		return o.size()
	case interface{ Size() int }:
		return 3 * o.Size()
	case *unstructured.Unstructured:
		return sizeOfValue(o.Object)
	}
	return 0
}

// sizeOfValue estimates the same for a decoded JSON value.
func sizeOfValue(value any) int {
	const word = 8
	n := 2 * word // the interface
	switch v := value.(type) {
	case string:
		n += 2*word + len(v)
	case map[string]any:
		n += 6 * word
		for key, element := range v {
			n += 2*word + len(key) + sizeOfValue(element)
		}
	case []any:
		n += 3 * word
		for _, element := range v {
			n += sizeOfValue(element)
		}
	default:
		n += word
	}
	return n
}

// ServeHTTP serves /debug/informers as text, or as JSON if the Accept header or ?format=json asks
// for it.
func (f *Factory) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	status := f.Status(true)
	for _, w := range f.followed() {
		status.Resources = append(status.Resources, w.status())
	}
	asJSON := strings.Contains(req.Header.Get("Accept"), "application/json")
	if format := req.URL.Query().Get("format"); format != "" {
		asJSON = format == "json"
	}
	w.Header().Set("Cache-Control", "no-store")
	if asJSON {
		w.Header().Set("Content-Type", "application/json")
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		_ = encoder.Encode(status) // the client went away
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	status.writeText(w)
}

func (s *Status) writeText(w io.Writer) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "RESOURCE\tFORM\tFOR\tSYNCED\tOBJECTS\tBYTES\tVERSION\tEVENT\tBOOKMARK\tLISTS\tRELISTS\tWATCHES")
	for i := range s.Resources {
		r := &s.Resources[i]
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%t\t%d\t%d\t%s\t%s\t%s\t%d\t%d\t%d\n",
			r.name(), r.Form, strings.Join(r.For, ","), r.Synced, r.Objects, r.ApproximateBytes, r.ResourceVersion,
			ago(r.LastEventAge), ago(r.LastBookmarkAge), r.Lists, r.Relists, r.Watches)
	}
	_ = t.Flush()
	for i := range s.Resources {
		r := &s.Resources[i]
		if r.Problem != "" {
			_, _ = fmt.Fprintf(w, "\n%s: %s\n", r.name(), r.Problem)
		}
		if f := r.LastFailure; f != nil {
			_, _ = fmt.Fprintf(w, "\n%s: last failure: %s, %d times from %s to %s: %s\n", r.name(), f.Verb, f.Count,
				f.Since.UTC().Format(time.RFC3339), f.Last.UTC().Format(time.RFC3339), f.Error)
		}
	}
	_, _ = fmt.Fprintf(w, "\nstarted: %t, cache mutations: %d\n", s.Started, s.CacheMutations)
}

func (s *ResourceStatus) name() string {
	if s.Group == "" {
		return s.Resource
	}
	return s.Resource + "." + s.Group
}

func ago(d *metav1.Duration) string {
	if d == nil {
		return "never"
	}
	return d.Round(time.Second).String() + " ago"
}
