// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

type config = configreload.Config

// fixture is a cluster with a manager that runs config-reload, in a bubble of fake time.
type fixture struct {
	*controllertest.Host
	t           *testing.T
	cfg         *config
	eventCounts map[types.UID]int32 // how often each Event was told at the last call of events

	mu       sync.Mutex
	requests []controllertest.Request
	hooks    []func(controllertest.Request) error
}

// newFixture creates the objects and starts the manager, with compatibility unless configure ends it.
func newFixture(t *testing.T, configure func(*config), objects ...runtime.Object) *fixture {
	t.Helper()
	return startFixture(t, controllertest.Setup{}, configure, objects)
}

func startFixture(t *testing.T, setup controllertest.Setup, configure func(*config), objects []runtime.Object) *fixture {
	t.Helper()
	entry := configreload.Entry()
	f := &fixture{t: t, cfg: entry.Config.(*config), eventCounts: map[types.UID]int32{}}
	f.cfg.Compat = true
	if configure != nil {
		configure(f.cfg)
	}
	if f.cfg.Compat {
		setup.Flags = []string{"--compat=reloader"}
	}
	setup.Entries = []controllers.Entry{entry}
	setup.Prepare = func(h *controllertest.Host) {
		f.Host = h
		h.OnRead(f.onRequest)
		h.OnWrite(f.onRequest)
	}
	setup.NewHost(t, objects...)
	return f
}

// onRequest is called for requests of the controller, one at a time.
func (f *fixture) onRequest(r controllertest.Request) error {
	f.mu.Lock()
	f.requests = append(f.requests, r)
	hooks := slices.Clone(f.hooks)
	f.mu.Unlock()
	for _, hook := range hooks {
		if err := hook(r); err != nil {
			return err
		}
	}
	return nil
}

// beforeRequest calls hook before each request with that verb, or try for the dry run of a creation, for that
// resource, such as deployments. The hook may refuse the request.
func (f *fixture) beforeRequest(verb, resource string, hook func(controllertest.Request) error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hooks = append(f.hooks, func(r controllertest.Request) error {
		if gotVerb, res := verbAndResource(r); gotVerb != verb || res != resource {
			return nil
		}
		return hook(r)
	})
}

func verbAndResource(r controllertest.Request) (verb, resource string) {
	resource, _, _ = strings.Cut(r.Resource, ".")
	if r.DryRun {
		return "try", resource
	}
	return r.Verb, resource
}

// answer is called before a request of the controller, which it may refuse.
type answer = func(f *fixture, r controllertest.Request) error

// answerNext calls each of these before one of the next requests of that kind.
func (f *fixture) answerNext(verb, resource string, answers ...answer) {
	f.beforeRequest(verb, resource, func(r controllertest.Request) error {
		if len(answers) == 0 {
			return nil
		}
		next := answers[0]
		answers = answers[1:]
		return next(f, r)
	})
}

func refusal(err error) answer { return func(*fixture, controllertest.Request) error { return err } }

// refuseNext refuses the next n requests.
func (f *fixture) refuseNext(n int, verb, resource string, err error) {
	f.answerNext(verb, resource, slices.Repeat([]answer{refusal(err)}, n)...)
}

// beforeFirst calls hook before the first request of that kind.
func (f *fixture) beforeFirst(verb, resource string, hook func()) {
	f.answerNext(verb, resource, func(*fixture, controllertest.Request) error { hook(); return nil })
}

var (
	errTryAgain = apierrors.NewInternalError(errors.New("try again"))
	errConflict = apierrors.NewConflict(appsv1.Resource("deployments"), "web", errTryAgain)
	errTimeout  = apierrors.NewTimeoutError("no answer", 1)
)

// applyRequest carries out a request of the controller, and returns the error of an answer that is lost.
func (f *fixture) applyRequest(r controllertest.Request) error {
	client, err := kubernetes.NewForConfig(f.RESTConfig())
	if err != nil {
		return err
	}
	switch r.Verb {
	case "patch":
		_, err = client.AppsV1().Deployments(r.Namespace).Patch(context.Background(), r.Name, types.StrategicMergePatchType, r.Body, metav1.PatchOptions{})
	case "create":
		var job batchv1.Job
		if err = json.Unmarshal(r.Body, &job); err == nil {
			_, err = client.BatchV1().Jobs(r.Namespace).Create(context.Background(), &job, metav1.CreateOptions{})
		}
	}
	if err != nil {
		return err
	}
	return errTimeout
}

// expectRequests compares the counts of the requests since the last call of forgetRequests.
func (f *fixture) expectRequests(want map[string]int) {
	f.t.Helper()
	assert.Equal(f.t, "requests", want, f.countRequests())
}

// advance lets time pass, with everything that happens in it. It and put return the fixture, so that calls
// can be chained.
func (f *fixture) advance(d time.Duration) *fixture {
	<-time.After(d)
	synctest.Wait()
	return f
}

// put adds or changes objects, and then lets time pass.
func (f *fixture) put(d time.Duration, objects ...runtime.Object) *fixture {
	f.t.Helper()
	f.Put(objects...)
	return f.advance(d)
}

func (f *fixture) web() *appsv1.Deployment {
	f.t.Helper()
	d := controllertest.Get[appsv1.Deployment](f.Host, "shop", "web")
	if d == nil {
		f.t.Fatal("there is no Deployment web")
	}
	return d
}

// touchWeb changes the Deployment web in what does not concern the controller.
func (f *fixture) touchWeb() {
	f.t.Helper()
	f.Put(annotated(f.web(), "example.org/touched", time.Now().String()))
}

// jobs returns the Jobs.
func (f *fixture) jobs() []*batchv1.Job { return controllertest.List[batchv1.Job](f.Host) }

// countRequests counts the requests since the last call of forgetRequests, by verb and resource. A list of
// the controller's cache is a question for the version of a source.
func (f *fixture) countRequests() map[string]int {
	f.mu.Lock()
	defer f.mu.Unlock()
	count := map[string]int{}
	for _, r := range f.requests {
		verb, resource := verbAndResource(r)
		count[verb+" "+resource]++
	}
	return count
}

func (f *fixture) forgetRequests() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.requests = nil
}

// runSuffix is the part of a name that distinguishes the Jobs of a CronJob.
var runSuffix = regexp.MustCompile("-[0-9a-f]{8}$")

// writes returns the controller's writes so far, refused ones too: verb, resource/name and body. Every
// patch must carry a resourceVersion, and a state that version; every deletion a UID. These are left out
// of the result.
func (f *fixture) writes() []string {
	f.t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	var list []string
	for _, r := range f.requests {
		verb, resource := verbAndResource(r)
		text := verb + " " + resource + "/" + r.Name
		switch verb {
		case "get", "list":
			continue
		case "patch":
			text += " " + f.patchBody(r.Body)
		case "create":
			text = runSuffix.ReplaceAllString(text, "-RUN")
		case "delete":
			var opts metav1.DeleteOptions
			if err := json.Unmarshal(r.Body, &opts); err != nil || opts.Preconditions == nil || opts.Preconditions.UID == nil {
				f.t.Errorf("deletion of %s without its UID", r.Name)
			}
		}
		list = append(list, text)
	}
	return list
}

func (f *fixture) patchBody(patch []byte) string {
	f.t.Helper()
	var body map[string]any
	assert.NoError(f.t, json.Unmarshal(patch, &body))
	m, _ := body["metadata"].(map[string]any)
	a, _ := m["annotations"].(map[string]any)
	version, _ := m["resourceVersion"].(string)
	delete(m, "resourceVersion")
	if recorded, ok := a[nativeState].(string); ok {
		state, recordedVersion := withoutVersion(recorded)
		if a[nativeState] = state; recordedVersion != version {
			f.t.Errorf("state %s is not recorded on the version of the patch: %s", recorded, patch)
		}
	}
	if version == "" {
		f.t.Errorf("patch without a resourceVersion: %s", patch)
	}
	if len(a) == 0 {
		delete(m, "annotations")
	}
	if len(m) == 0 {
		delete(body, "metadata")
	}
	return toJSON(body)
}

// expectWrites compares the writes so far.
func (f *fixture) expectWrites(want ...string) {
	f.t.Helper()
	assert.Equal(f.t, "writes", want, f.writes(), cmpopts.EquateEmpty())
}

// expectWriteCount compares the number of writes so far.
func (f *fixture) expectWriteCount(want int) {
	f.t.Helper()
	if got := f.writes(); len(got) != want {
		f.t.Errorf("%d writes so far, want %d: %v", len(got), want, got)
	}
}

// expectEvents compares the Events since the last call of events, sorted.
func (f *fixture) expectEvents(want ...string) {
	f.t.Helper()
	assert.Equal(f.t, "Events", want, f.events(), cmpopts.EquateEmpty())
}

// events returns the Events since the last call, sorted.
func (f *fixture) events() (list []string) {
	f.advance(10 * time.Millisecond)
	for _, e := range controllertest.List[corev1.Event](f.Host) {
		for range e.Count - f.eventCounts[e.UID] {
			list = append(list, fmt.Sprintf("%s %s %s", e.Type, e.Reason, e.Message))
		}
		f.eventCounts[e.UID] = e.Count
	}
	slices.Sort(list)
	return list
}

// expectMetric compares the sum of a metric over the series with these labels.
func (f *fixture) expectMetric(want float64, name string, labels ...string) {
	f.t.Helper()
	assert.Equal(f.t, name, want, f.Metric("quartermaster_config_reload_"+name, labels...))
}

func (f *fixture) expectNoErrors() {
	f.t.Helper()
	assert.Equal(f.t, "reconciles failed", 0, f.status().Errors)
}

func (f *fixture) status() controllers.Status { return f.Controller(configreload.Name).Status() }

func toJSON(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(data)
}
