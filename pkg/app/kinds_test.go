// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
)

// discoveryServer answers discovery by path, with a status if the answer is one, and hangs at the others.
type discoveryServer struct {
	answers map[string]string
	asked   []string
}

func (s *discoveryServer) RoundTrip(r *http.Request) (*http.Response, error) {
	s.asked = append(s.asked, r.URL.Path)
	body, ok := s.answers[r.URL.Path]
	if !ok {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	status := map[string]int{"404": 404, "503": 503}[body]
	if status == 0 {
		status = 200
	}
	return &http.Response{StatusCode: status, Header: http.Header{"Content-Type": {"application/json"}}, Body: io.NopCloser(strings.NewReader(body)), Request: r}, nil
}

const widgetsAlone = `{"kind":"APIResourceList","resources":[
	{"name":"widgets","kind":"Widget","namespaced":true},{"name":"widgets/scale","kind":"Scale","namespaced":true}]}`

// noServer stands for 404 at every path, noAnswer for a request that hangs.
const noServer, noAnswer, someGroups = "no server", "no answer", `{"kind":"APIGroupList","groups":[{"name":"apps","versions":[{"groupVersion":"apps/v1","version":"v1"}]}]}`

func TestMapperAsksForUnknownKinds(t *testing.T) {
	widget, scale, gadget := schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"},
		schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Scale"}, schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Gadget"}
	away := schema.GroupVersionKind{Group: "away.example.com", Version: "v1", Kind: "Thing"}
	const path = "/apis/example.com/v1"
	for name, tc := range map[string]struct {
		answer string // at first
		ask    []schema.GroupVersionKind
		later  string // the answer after the first round; asked again after unknownKindTTL, or after pause
		want   []string
		asked  int
		pause  time.Duration
	}{
		"a kind is asked for once":          {widgetsAlone, []schema.GroupVersionKind{widget, widget}, widgetsAlone, []string{"widgets", "widgets", "widgets", "widgets"}, 1, 0},
		"an unknown one every 10 s at most": {widgetsAlone, []schema.GroupVersionKind{gadget, gadget}, widgetsAlone, []string{"none", "none", "none", "none"}, 2, 0},
		"one that comes is found":           {widgetsAlone, []schema.GroupVersionKind{gadget}, strings.ReplaceAll(strings.ReplaceAll(widgetsAlone, "widget", "gadget"), "Widget", "Gadget"), []string{"none", "gadgets"}, 2, 0},
		"one that is defined again with another plural is found after 10 min, once it has been asked for": {
			widgetsAlone, []schema.GroupVersionKind{widget, widget}, strings.Replace(widgetsAlone, "widgets", "widgetries", 1),
			[]string{"widgets", "widgets", "widgets", "widgetries"}, 2, knownKindTTL},
		"one that is defined again is not looked for before": {
			widgetsAlone, []schema.GroupVersionKind{widget}, strings.Replace(widgetsAlone, "widgets", "widgetries", 1), []string{"widgets", "widgets"}, 1, knownKindTTL - time.Second},
		"a subresource is none":                                    {widgetsAlone, []schema.GroupVersionKind{scale}, widgetsAlone, []string{"none", "none"}, 2, 0},
		"a version that comes is found":                            {"404", []schema.GroupVersionKind{widget, widget}, widgetsAlone, []string{"none", "none", "widgets", "widgets"}, 2, 0},
		"a version that goes is noticed after 10 min":              {widgetsAlone, []schema.GroupVersionKind{widget, widget}, "404", []string{"widgets", "widgets", "widgets", "none"}, 2, knownKindTTL},
		"a known kind does not wait for an answer":                 {widgetsAlone, []schema.GroupVersionKind{widget}, noAnswer, []string{"widgets", "widgets"}, 2, knownKindTTL},
		"a known kind outlasts a failure":                          {widgetsAlone, []schema.GroupVersionKind{widget}, "503", []string{"widgets", "widgets"}, 2, knownKindTTL},
		"a known kind outlasts a load balancer that knows no path": {widgetsAlone, []schema.GroupVersionKind{widget, gadget}, noServer, []string{"widgets", "none", "widgets", "failure"}, 3, knownKindTTL},
		"a failure is not remembered":                              {"503", []schema.GroupVersionKind{widget, widget}, widgetsAlone, []string{"failure", "failure", "widgets", "widgets"}, 3, 0},
	} {
		inBubble(t, name, func(t *testing.T) {
			server := &discoveryServer{answers: map[string]string{path: tc.answer, "/api": "404", "/apis": someGroups}}
			m, err := newKinds(&rest.Config{Host: "http://api", Transport: server})
			must(t, err)
			waits, giveUp := context.WithCancel(t.Context())
			gaveUp := make(chan error, 1)
			go func() { _, err := m.mapping(waits, away); gaveUp <- err }()
			synctest.Wait()
			var got []string
			for range 2 {
				for _, kind := range tc.ask {
					start := time.Now()
					found, err := m.mapping(t.Context(), kind)
					if d := time.Since(start); d > 0 {
						t.Errorf("it took %s to find %s", d, kind.Kind)
					}
					synctest.Wait() // for what is asked beside
					switch {
					case meta.IsNoMatchError(err):
						got = append(got, "none")
					case err != nil:
						got = append(got, "failure")
					default:
						got = append(got, found.Resource.Resource)
					}
				}
				server.answers[path] = tc.later
				if tc.later == noAnswer {
					delete(server.answers, path)
				}
				if tc.later == noServer {
					server.answers = map[string]string{path: "404", "/api": "404", "/apis": "404"}
				}
				<-time.After(max(unknownKindTTL, tc.pause))
			}
			asked := len(slices.DeleteFunc(slices.Clone(server.asked), func(p string) bool { return p != path }))
			if !slices.Equal(got, tc.want) || asked != tc.asked {
				t.Errorf("found %v with %d requests, want %v with %d", got, asked, tc.want, tc.asked)
			}
			giveUp()
			if err := <-gaveUp; tc.pause == 0 && !errors.Is(err, context.Canceled) {
				t.Errorf("who waits for a version that hangs gave up with %v", err)
			}
			<-time.After(discoveryTimeout)
			synctest.Wait()
		})
	}
}
