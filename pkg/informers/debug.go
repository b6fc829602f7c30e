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
)

// Status is what /debug/informers shows.
type Status struct {
	Started   bool             `json:"started"` // in the process's own cluster
	Resources []ResourceStatus `json:"resources"`
}

// ResourceStatus is the state of one informer in one namespace, or in all. An age is nil until
// there is something to count from.
type ResourceStatus struct {
	Cluster   string   `json:"cluster,omitempty"` // empty for the process's own
	Group     string   `json:"group"`
	Version   string   `json:"version"`
	Resource  string   `json:"resource"`
	Namespace string   `json:"namespace,omitempty"`
	For       []string `json:"for"`
	Form      string   `json:"form"`
	// Content are the controllers for which the data of ConfigMaps or Secrets are in memory.
	Content         []string         `json:"content,omitempty"`
	LabelSelector   string           `json:"labelSelector,omitempty"`
	FieldSelector   string           `json:"fieldSelector,omitempty"`
	Synced          bool             `json:"synced"`
	Absent          bool             `json:"absent,omitempty"`
	Forbidden       bool             `json:"forbidden,omitempty"`
	Objects         int              `json:"objects"`
	Misfits         int              `json:"misfits,omitempty"`
	ResourceVersion string           `json:"resourceVersion"`
	LastActivityAge *metav1.Duration `json:"lastActivityAge,omitempty"`
	LastEventAge    *metav1.Duration `json:"lastEventAge,omitempty"`
	Lists           int64            `json:"lists"`
	Relists         int64            `json:"relists"`
	Watches         int64            `json:"watches"`
	Events          int64            `json:"events"`
	Failures        int64            `json:"failures"`
	LastFailure     *FailureStatus   `json:"lastFailure,omitempty"`
	Problem         string           `json:"problem,omitempty"`
}

// FailureStatus is the last series of failed requests with one verb.
type FailureStatus struct {
	Verb  string      `json:"verb"`
	Error string      `json:"error"`
	Count int64       `json:"count"`
	Since metav1.Time `json:"since"`
	Last  metav1.Time `json:"last"`
}

// Status returns the present state of all informers.
func (f *ClusterCache) Status() Status {
	s := Status{Started: f.started(), Resources: []ResourceStatus{}}
	for _, i := range f.all() {
		s.Resources = append(s.Resources, i.status()...)
	}
	return s
}

// status returns the state of an informer in each of its namespaces. The first counts the objects that do
// not fit their Go type.
func (i *informer) status() (all []ResourceStatus) {
	for _, f := range i.feeds {
		all = append(all, f.state.status())
	}
	all[0].Misfits = i.panics.misfits()
	return all
}

// ServeHTTP serves /debug/informers as text, or as JSON if the Accept header or ?format=json asks
// for it.
func (c *Caches) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	status := Status{Resources: []ResourceStatus{}}
	for _, f := range c.clusters() {
		s := f.Status()
		status.Started = status.Started || f.cfg.Cluster == "" && s.Started
		status.Resources = append(status.Resources, s.Resources...)
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
	_, _ = fmt.Fprintln(t, "RESOURCE\tFORM\tFOR\tSYNCED\tOBJECTS\tVERSION\tEVENT\tACTIVITY\tLISTS\tRELISTS\tWATCHES")
	for i := range s.Resources {
		r := &s.Resources[i]
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%t\t%d\t%s\t%s\t%s\t%d\t%d\t%d\n",
			r.name(), r.Form, strings.Join(r.For, ","), r.Synced, r.Objects, r.ResourceVersion,
			ago(r.LastEventAge), ago(r.LastActivityAge), r.Lists, r.Relists, r.Watches)
	}
	_ = t.Flush()
	for i := range s.Resources {
		r := &s.Resources[i]
		if len(r.Content) > 0 {
			_, _ = fmt.Fprintf(w, "\n%s: their data are in memory for %s, of those that %q %q chooses\n",
				r.name(), strings.Join(r.Content, ", "), r.LabelSelector, r.FieldSelector)
		}
		if r.Problem != "" {
			_, _ = fmt.Fprintf(w, "\n%s: %s\n", r.name(), r.Problem)
		}
		if r.Misfits > 0 {
			_, _ = fmt.Fprintf(w, "\n%s: %d objects do not fit their Go type and are left out; the log names them\n", r.name(), r.Misfits)
		}
		if f := r.LastFailure; f != nil {
			_, _ = fmt.Fprintf(w, "\n%s: last failure: %s, %d times from %s to %s: %s\n", r.name(), f.Verb, f.Count,
				f.Since.UTC().Format(time.RFC3339), f.Last.UTC().Format(time.RFC3339), f.Error)
		}
	}
	_, _ = fmt.Fprintf(w, "\nstarted: %t\n", s.Started)
}

func (s *ResourceStatus) name() string {
	name := s.Resource
	if s.Group != "" {
		name += "." + s.Group
	}
	if s.Namespace != "" {
		name += " in " + s.Namespace
	}
	if s.Cluster != "" {
		name += " of " + s.Cluster
	}
	return name
}

func ago(d *metav1.Duration) string {
	if d == nil {
		return "never"
	}
	return d.Round(time.Second).String() + " ago"
}
