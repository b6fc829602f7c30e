// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"cmp"
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// Request is a request of a controller.
type Request struct {
	// Controller is the name of the entry.
	Controller string
	// Verb is get, list, create, update, patch, apply, delete or deletecollection. Resource is for example
	// deployments.apps or widgets.example.com/status.
	Verb, Resource string
	// Name is the prefix of the name if the API server is to complete it. A list has one if its field
	// selector has.
	Namespace, Name string
	DryRun          bool
	Body            []byte
}

// String returns the request in the form of [APIServer.Writes].
func (r Request) String() string {
	text := strings.TrimSpace(r.Verb + " " + r.Resource + " " + path.Join(r.Namespace, r.Name))
	if r.DryRun {
		text = "dry run: " + text
	}
	return text
}

func requestOf(r apiserver.Request) Request {
	q := Request{Controller: agentOf(r), Verb: r.Verb, Resource: r.Resource.String(), Namespace: r.Namespace, Name: r.Name, DryRun: r.DryRun, Body: r.Body}
	if r.Subresource != "" {
		q.Resource += "/" + r.Subresource
	}
	if r.Patch == types.ApplyPatchType {
		q.Verb = "apply"
	}
	var sent metav1.PartialObjectMetadata
	if q.Verb == "create" && q.Name == "" && json.Unmarshal(r.Body, &sent) == nil {
		q.Name = cmp.Or(sent.Name, sent.GenerateName)
	}
	return q
}

// OnWrite calls hook before each write of the controllers, and refuses the write with the hook's error, if
// any. The hook may change objects with Put, to provoke a conflict. It is called for one request at a time.
func (s *APIServer) OnWrite(hook func(Request) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onWrite = hook
}

// OnRead is OnWrite for reads from the API server, but neither for reads from the cache nor for the lists
// and watches of the cache and of informers.Follow.
func (s *APIServer) OnRead(hook func(Request) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.onRead = hook
}

// Writes returns all writes of the controllers since the last call, refused writes too, in the order of
// time. Writes without an order, as in one Apply, are sorted:
//
//	create configmaps shop/a
//	apply deployments.apps shop/a
//	apply deployments.apps shop/a (unchanged)
//	update widgets.example.com/status shop/a: Conflict
//	dry run: delete pods shop/a
//
// Events are not among the writes. With several entries, each line begins with the name of its entry and a
// colon.
func (s *APIServer) Writes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortStableFunc(s.writes, func(a, b written) int {
		return cmp.Or(a.at.Compare(b.at), strings.Compare(a.text, b.text))
	})
	var texts []string
	for _, w := range s.writes {
		texts = append(texts, w.text)
	}
	s.writes = nil
	return texts
}

// written is a write with its result, and the instant of the bubble's clock at which it took effect.
type written struct {
	at   time.Time
	text string
}

// recordWrite records a write of a controller.
func (s *APIServer) recordWrite(r apiserver.Request, result apiserver.Result) {
	if !s.hasEntry(agentOf(r)) {
		return
	}
	text := s.withEntryName(agentOf(r), requestOf(r).String())
	switch {
	case result.Err != nil && apierrors.ReasonForError(result.Err) == "":
		text += ": " + result.Err.Error()
	case result.Err != nil:
		text += ": " + string(apierrors.ReasonForError(result.Err))
	case result.Unchanged:
		text += " (unchanged)"
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writes = append(s.writes, written{time.Now(), text})
}

// withEntryName returns text with the name of its entry, if there are several entries.
func (s *APIServer) withEntryName(name, text string) string {
	if len(s.entries) > 1 {
		return name + ": " + text
	}
	return text
}

// Events returns the Events that the controllers have recorded, the oldest first, such as
// "Normal Created shop/a: made Deployment a", with the names of several entries as in [APIServer.Writes].
func (s *APIServer) Events() []string {
	s.t.Helper()
	events := List[corev1.Event](s)
	slices.SortStableFunc(events, func(a, b *corev1.Event) int { return strings.Compare(string(a.UID), string(b.UID)) })
	var texts []string
	for _, e := range events {
		_, name, _ := strings.Cut(strings.TrimPrefix(e.Source.Component, buildPrefix), "-")
		if s.hasEntry(name) { // other Events are the manager's own
			texts = append(texts, s.withEntryName(name, fmt.Sprintf("%s %s %s: %s",
				e.Type, e.Reason, path.Join(e.InvolvedObject.Namespace, e.InvolvedObject.Name), e.Message)))
		}
	}
	return texts
}

// RESTConfig returns the configuration for a client of the test's own, which may do everything.
func (s *APIServer) RESTConfig() *rest.Config {
	config := s.network.config()
	config.UserAgent, config.ContentType = testAgent, runtime.ContentTypeJSON
	return config
}

func (s *APIServer) unsupported(r apiserver.Request, err error) {
	s.t.Errorf("controller %s: %s: %v", agentOf(r), requestOf(r), err)
}
