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

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

type config = configreload.Config

// fixture is a cluster with a manager that runs config-reload, in a bubble of fake time.
type fixture struct {
	*controllertest.Host
	t     *testing.T
	cfg   *config
	heard map[types.UID]int32 // how often each Event was told at the last call of events

	mu       sync.Mutex
	requests []controllertest.Request
	hooks    []func(controllertest.Request) error
}

// newFixture creates the objects and starts the manager, with compatibility unless configure ends it.
func newFixture(t *testing.T, configure func(*config), objects ...runtime.Object) *fixture {
	t.Helper()
	return begin(t, controllertest.Setup{}, configure, objects)
}

func begin(t *testing.T, setup controllertest.Setup, configure func(*config), objects []runtime.Object) *fixture {
	t.Helper()
	entry := configreload.Entry()
	w := &fixture{t: t, cfg: entry.Config.(*config), heard: map[types.UID]int32{}}
	w.cfg.Compat = true
	if configure != nil {
		configure(w.cfg)
	}
	if w.cfg.Compat {
		setup.Flags = []string{"--compat=reloader"}
	}
	setup.Entries = []controllers.Entry{entry}
	setup.Prepare = func(h *controllertest.Host) {
		w.Host = h
		h.OnRead(w.request)
		h.OnWrite(w.request)
	}
	setup.NewHost(t, objects...)
	return w
}

// request is called for requests of the controller, one at a time.
func (w *fixture) request(r controllertest.Request) error {
	w.mu.Lock()
	w.requests = append(w.requests, r)
	hooks := slices.Clone(w.hooks)
	w.mu.Unlock()
	for _, hook := range hooks {
		if err := hook(r); err != nil {
			return err
		}
	}
	return nil
}

// before calls hook before each request with that verb, or try for the dry run of a creation, for that
// resource, such as deployments. The hook may refuse the request.
func (w *fixture) before(verb, resource string, hook func(controllertest.Request) error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.hooks = append(w.hooks, func(r controllertest.Request) error {
		if v, of := kindOf(r); v != verb || of != resource {
			return nil
		}
		return hook(r)
	})
}

func kindOf(r controllertest.Request) (verb, resource string) {
	resource, _, _ = strings.Cut(r.Resource, ".")
	if r.DryRun {
		return "try", resource
	}
	return r.Verb, resource
}

// refuse refuses the next requests, one for each error; nil lets one pass.
func (w *fixture) refuse(verb, resource string, errs ...error) {
	w.before(verb, resource, func(controllertest.Request) error {
		if len(errs) == 0 {
			return nil
		}
		err := errs[0]
		errs = errs[1:]
		return err
	})
}

var errTryAgain = apierrors.NewInternalError(errors.New("try again"))

// once calls f before the first request of that kind.
func (w *fixture) once(verb, resource string, f func()) {
	done := false
	w.before(verb, resource, func(controllertest.Request) error {
		if !done {
			done = true
			f()
		}
		return nil
	})
}

// apply carries out a request of the controller. A hook that then returns an error loses the answer.
func (w *fixture) apply(r controllertest.Request) error {
	client, err := kubernetes.NewForConfig(w.RESTConfig())
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
	return err
}

// pass lets time pass, with everything that happens in it.
func (w *fixture) pass(d time.Duration) {
	<-time.After(d)
	synctest.Wait()
}

func (w *fixture) deployment(name string) *appsv1.Deployment {
	w.t.Helper()
	d := controllertest.Get[appsv1.Deployment](w.Host, "shop", name)
	if d == nil {
		w.t.Fatalf("there is no Deployment %s", name)
	}
	return d
}

// state returns what is recorded on a Deployment.
func (w *fixture) state(name string) string {
	w.t.Helper()
	state, _ := withoutVersion(w.deployment(name).Annotations[nativeState])
	return state
}

// asked counts the requests since the last call of forget, by verb and resource. A list of the controller's
// cache is a question for the version of a source.
func (w *fixture) asked() map[string]int {
	w.mu.Lock()
	defer w.mu.Unlock()
	count := map[string]int{}
	for _, r := range w.requests {
		verb, resource := kindOf(r)
		count[verb+" "+resource]++
	}
	return count
}

func (w *fixture) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.requests = nil
}

// runSuffix is the part of a name that distinguishes the Jobs of a CronJob.
var runSuffix = regexp.MustCompile("-[0-9a-f]{8}$")

// writes returns the controller's writes so far, refused ones too: verb, resource/name and body. Every
// patch must carry a resourceVersion, and a state that version; every deletion a UID. These are left out
// of the result.
func (w *fixture) writes() []string {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []string
	for _, r := range w.requests {
		verb, resource := kindOf(r)
		text := verb + " " + resource + "/" + r.Name
		switch verb {
		case "get", "list":
			continue
		case "patch":
			text += " " + w.body(r.Body)
		case "create":
			text = runSuffix.ReplaceAllString(text, "-RUN")
		case "delete":
			var opts metav1.DeleteOptions
			if err := json.Unmarshal(r.Body, &opts); err != nil || opts.Preconditions == nil || opts.Preconditions.UID == nil {
				w.t.Errorf("deletion of %s without its UID", r.Name)
			}
		}
		list = append(list, text)
	}
	return list
}

func (w *fixture) body(patch []byte) string {
	w.t.Helper()
	var body map[string]any
	if err := json.Unmarshal(patch, &body); err != nil {
		w.t.Fatal(err)
	}
	m, _ := body["metadata"].(map[string]any)
	if m["resourceVersion"] == nil || m["resourceVersion"] == "" {
		w.t.Errorf("patch without a resourceVersion: %s", patch)
	}
	a, _ := m["annotations"].(map[string]any)
	if recorded, ok := a[nativeState].(string); ok {
		state, on := withoutVersion(recorded)
		if on != m["resourceVersion"] {
			w.t.Errorf("state %s is not recorded on the version of the patch: %s", recorded, patch)
		}
		a[nativeState] = state
	}
	if a != nil && len(a) == 0 {
		delete(m, "annotations")
	}
	delete(m, "resourceVersion")
	if len(m) == 0 {
		delete(body, "metadata")
	}
	return toJSON(body)
}

// expect compares the writes so far.
func (w *fixture) expect(want ...string) {
	w.t.Helper()
	if diff := cmp.Diff(want, w.writes(), cmpopts.EquateEmpty()); diff != "" {
		w.t.Errorf("writes differ (-want +got):\n%s", diff)
	}
}

// written compares the number of writes so far.
func (w *fixture) written(want int) {
	w.t.Helper()
	if got := w.writes(); len(got) != want {
		w.t.Errorf("%d writes so far, want %d: %v", len(got), want, got)
	}
}

// told compares the Events since the last call of events, sorted.
func (w *fixture) told(want ...string) {
	w.t.Helper()
	if diff := cmp.Diff(want, w.events(), cmpopts.EquateEmpty()); diff != "" {
		w.t.Errorf("Events differ (-want +got):\n%s", diff)
	}
}

// events returns the Events since the last call, sorted.
func (w *fixture) events() (list []string) {
	w.pass(10 * time.Millisecond)
	for _, e := range controllertest.List[corev1.Event](w.Host) {
		for range e.Count - w.heard[e.UID] {
			list = append(list, fmt.Sprintf("%s %s %s", e.Type, e.Reason, e.Message))
		}
		w.heard[e.UID] = e.Count
	}
	slices.Sort(list)
	return list
}

// count compares the sum of a metric over the series with these labels.
func (w *fixture) count(want float64, name string, labels ...string) {
	w.t.Helper()
	if got := w.Metric("quartermaster_config_reload_"+name, labels...); got != want {
		w.t.Errorf("%s is %v, want %v", name, got, want)
	}
}

// noErrors checks that no reconcile has failed.
func (w *fixture) noErrors() {
	w.t.Helper()
	if n := w.status().Errors; n != 0 {
		w.t.Errorf("%d reconciles failed", n)
	}
}

func (w *fixture) status() controllers.Status { return w.Controller(configreload.Name).Status() }

func toJSON(v any) string {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(data)
}
