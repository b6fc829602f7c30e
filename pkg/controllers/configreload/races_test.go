// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"pgregory.net/rapid"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestConflictIsDecidedOnALiveRead(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	web := pod(reads("app-config"))
	cases := map[string]struct {
		// meanwhile is what somebody writes between the decision and the patch.
		meanwhile func(w *fixture)
		want      []string
	}{
		"the change is still to be made": {
			meanwhile: func(w *fixture) { w.Put(annotated(auto(web, known1), "example.org/touched", "1")) },
			want:      []string{env(known2, "web/"+cmVar, h2), env(known2, "web/"+cmVar, h2)},
		},
		"another manager made it": {
			meanwhile: func(w *fixture) {
				done := recordedOn(w.deployment("web").ResourceVersion, known2)
				w.Put(auto(pod(reads("app-config"), variableSet(cmVar, h2)), done))
			},
			want: []string{env(known2, "web/"+cmVar, h2)},
		},
		"somebody wrote what it would have written, and the template stays as it is": {
			meanwhile: func(w *fixture) { w.Put(auto(pod(reads("app-config"), variableSet(cmVar, h2)), known2)) },
			want:      []string{env(known2, "web/"+cmVar, h2), envAlone("web/"+cmVar, h2)},
		},
		"the workload opted out": {meanwhile: func(w *fixture) { w.Put(deploy(web, nativeState, known1)) }, want: []string{env(known2, "web/"+cmVar, h2), stateOnly("")}},
		"the workload is gone":   {meanwhile: func(w *fixture) { w.Delete(deploy(web)) }, want: []string{env(known2, "web/"+cmVar, h2)}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), auto(web, known1))
				w.once("patch", "deployments", func() { tc.meanwhile(w) })
				changeCM(w)
				w.pass(time.Hour)
				w.expect(tc.want...)
				w.noErrors()
			})
		})
	}
}

func TestConflictWithoutEndIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil, cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		conflict := apierrors.NewConflict(appsv1.Resource("deployments"), "web", errTryAgain)
		w.refuse("patch", "deployments", slices.Repeat([]error{conflict}, 3*4)...)
		changeCM(w)
		w.pass(time.Minute)
		if got := w.state("web"); got != stateOf(cmKey, h2) {
			t.Errorf("state = %s, want the state of the change", got)
		}
		w.noErrors()
		failed := "Warning ReloadFail Reload for ConfigMap shop/app-config failed: " + conflict.Error()
		w.told("Normal Reloaded Reloaded for ConfigMap shop/app-config", failed, failed, failed)
	})
}

// A webhook may deny a write with any status, including 404, which also means that the workload is
// gone.
func TestNotFoundOfSomethingElseLosesNothing(t *testing.T) {
	known2 := stateOf(cmKey, h2)
	for name, tc := range map[string]struct {
		web    *appsv1.Deployment
		change func(w *fixture)
		want   string   // the last write
		events []string // without failures that the next attempt repairs
		denied int
	}{
		"a reload": {
			web:    auto(pod(reads("app-config")), stateOf(cmKey, h1)),
			change: changeCM, denied: 1,
			want:   env(known2, "web/"+cmVar, h2),
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"},
		},
		"a reload that is denied for longer": {
			web:    auto(pod(reads("app-config")), stateOf(cmKey, h1)),
			change: changeCM, denied: 4,
			want: env(known2, "web/"+cmVar, h2),
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config",
				`Warning ReloadFail Reload for ConfigMap shop/app-config failed: admission webhook "teams.example" denied the request: teams.policy.example "shop" not found`},
		},
		"the recording of a state": {
			web:    deploy(pod(reads("app-config"))),
			change: func(w *fixture) { w.Put(deploy(pod(reads("app-config")), kAuto, "true")) }, denied: 4,
			want: stateOnly(stateOf(cmKey, h1)),
			events: []string{"Warning ReloadStateFail The state of its sources could not be recorded, so a change while no manager runs may be missed: " +
				`admission webhook "teams.example" denied the request: teams.policy.example "shop" not found`},
		},
		"the end of a pause": {
			web: func() *appsv1.Deployment {
				d := deploy(pod(), kPause, "5m", kPausedAt, second(-240))
				d.Spec.Paused = true
				return d
			}(),
			change: func(*fixture) {}, denied: 4,
			want: resume(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), tc.web)
				denial := apierrors.NewNotFound(schema.GroupResource{Group: "policy.example", Resource: "teams"}, "shop")
				denial.ErrStatus.Message = `admission webhook "teams.example" denied the request: ` + denial.ErrStatus.Message
				w.refuse("patch", "deployments", slices.Repeat([]error{denial}, tc.denied)...)
				tc.change(w)
				w.pass(time.Hour)
				if writes := w.writes(); len(writes) <= tc.denied || writes[len(writes)-1] != tc.want {
					t.Errorf("writes %v; want more than the %d that are denied, and the last to be %s", writes, tc.denied, tc.want)
				}
				w.told(tc.events...)
			})
		})
	}
}

// When the response to a write arrives, there may be another object of that name, of which more is
// known.
func TestLateAnswerIsNotOfTheSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := auto(pod(reads("app-config")), stateOf(cmKey, h1))
		w := newFixture(t, nil, cm1(), web)
		w.Latency(30 * time.Second)
		changeCM(w)
		w.pass(10 * time.Second)
		w.Delete(web)
		successor := deploy(pod(reads("app-config")), kAuto, "true")
		successor.UID = "successor"
		w.Put(successor)
		w.pass(10 * time.Second)
		w.Put(cm("app-config", "color", "green"))
		w.pass(time.Hour)
		want := []corev1.EnvVar{{Name: cmVar, Value: hashOf("color", "green")}}
		if diff := cmp.Diff(want, w.deployment("web").Spec.Template.Spec.Containers[0].Env); diff != "" {
			t.Errorf("mark differs (-want +got):\n%s", diff)
		}
	})
}

// If the state is removed while a reload is being written, it is known from the version that the
// reload was decided on, even if the watch is late.
func TestStateIsRemovedWhileAReloadIsOnItsWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := pod(reads("app-config"))
		w := newFixture(t, nil, cm1(), auto(web, stateOf(cmKey, h1)))
		w.Lag(time.Second, "deployments")
		w.once("patch", "deployments", func() { w.Put(deploy(web, kAuto, "true")) })
		changeCM(w)
		w.pass(time.Hour)
		rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
		w.expect(rolled, rolled)
	})
}

// raceStep is one event; n is drawn from 0 to 2999.
type raceStep struct {
	name string
	n    int
}

var raceSteps = map[string]func(w *fixture, n int){
	"the source changes": func(w *fixture, n int) { w.Put(cm("app-config", "v", fmt.Sprint(n%4))) },
	"the source goes": func(w *fixture, _ int) {
		if c := controllertest.Get[corev1.ConfigMap](w.Host, "shop", "app-config"); c != nil {
			w.Delete(c)
		}
	},
	"somebody touches the workload": func(w *fixture, n int) {
		synctest.Wait() // reading and writing is one step
		w.Put(annotated(w.deployment("web"), "example.org/touched", fmt.Sprint(n)))
	},
	"time passes":                 func(w *fixture, n int) { w.pass(time.Duration(n) * time.Millisecond) },
	"another manager takes over":  func(w *fixture, _ int) { w.Restart() },
	"no manager runs for a while": func(w *fixture, _ int) { w.Restart(func() { w.pass(time.Second) }) },
}

// raceCase is an order of events, with the outcomes of the patches.
type raceCase struct {
	quiet    time.Duration
	steps    []raceStep
	outcomes []string
	lags     map[string]time.Duration
}

var raceCases = rapid.Custom(func(t *rapid.T) raceCase {
	step := rapid.Custom(func(t *rapid.T) raceStep {
		return raceStep{rapid.SampledFrom(slices.Sorted(maps.Keys(raceSteps))).Draw(t, "name"), rapid.IntRange(0, 2999).Draw(t, "n")}
	})
	outcome := rapid.SampledFrom([]string{"success", "success", "success", "conflict", "429", "time-out", "applied, answer lost", "applied late, answer lost"})
	lag := rapid.SampledFrom([]time.Duration{0, 0, 10 * time.Millisecond, 700 * time.Millisecond})
	return raceCase{
		quiet:    rapid.SampledFrom([]time.Duration{0, time.Second}).Draw(t, "quiet period"),
		steps:    rapid.SliceOfN(step, 1, 25).Draw(t, "steps"),
		outcomes: rapid.SliceOfN(outcome, 0, 20).Draw(t, "outcomes of patches"),
		lags:     map[string]time.Duration{"configmaps": lag.Draw(t, "lag of sources"), "deployments": lag.Draw(t, "lag of workloads")},
	}
})

// In any order of events and with any outcome of requests, no change is lost and none rolls twice.
func TestChangesRollExactlyOnce(t *testing.T) {
	for seed := range 10 {
		for _, problem := range race(t, raceCases.Example(seed)) {
			t.Errorf("seed %d: %s", seed, problem)
		}
	}
}

func TestLongChangesRollExactlyOnce(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		for _, problem := range race(t, raceCases.Draw(rt, "case")) {
			rt.Error(problem)
		}
	})
}

// race returns the problems found at the end.
func race(t *testing.T, c raceCase) (problems []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		known := stateOf(cmKey, hashOf("v", "0"))
		w := newFixture(t, func(cfg *config) {
			cfg.QuietPeriod = c.quiet
			strategyAnnotations(cfg) // every patch rolls; a variable would hide a second patch
			cfg.IgnoredSources, cfg.IgnoredKinds = []string{"secrets"}, []string{"statefulsets", "daemonsets", "cronjobs", "jobs"}
		}, cm("app-config", "v", "0"), auto(pod(reads("app-config")), known))
		for resource, lag := range c.lags {
			w.Lag(lag, resource)
		}
		w.faults(c.outcomes)
		rolled := w.audit()
		for _, s := range c.steps {
			raceSteps[s.name](w, s.n)
		}
		w.Put(cm("app-config", "v", "final"))
		w.pass(2 * time.Hour) // including back-off
		for i := 1; i < len(*rolled); i++ {
			if (*rolled)[i] == (*rolled)[i-1] {
				problems = append(problems, fmt.Sprintf("rolled twice to the same data: %v", *rolled))
			}
		}
		want := hashOf("v", "final")
		if n := len(*rolled); n == 0 || (*rolled)[n-1] != want {
			problems = append(problems, fmt.Sprintf("the last change is lost: %v", *rolled))
		}
		if got := w.state("web"); got != stateOf(cmKey, want) {
			problems = append(problems, "state at the end is "+got)
		}
	})
	return problems
}

// faults makes patches of Deployments fail, before or after they took effect.
func (w *fixture) faults(outcomes []string) {
	timeout := apierrors.NewTimeoutError("made up", 1)
	w.before("patch", "deployments", func(r controllertest.Request) error {
		if len(outcomes) == 0 {
			return nil
		}
		outcome := outcomes[0]
		outcomes = outcomes[1:]
		switch outcome {
		case "conflict":
			return apierrors.NewConflict(appsv1.Resource("deployments"), "web", errTryAgain)
		case "429":
			return apierrors.NewTooManyRequests("made up", 2)
		case "time-out":
			return timeout
		case "applied, answer lost":
			if err := w.apply(r); err != nil {
				return err
			}
			return timeout
		case "applied late, answer lost":
			time.AfterFunc(1500*time.Millisecond, func() { _ = w.apply(r) })
			return timeout
		}
		return nil
	})
}

// audit collects the hash in the mark each time the pod template changes in the API server.
func (w *fixture) audit() *[]string {
	var values []string
	client, err := kubernetes.NewForConfig(w.RESTConfig())
	if err != nil {
		w.t.Fatal(err)
	}
	last := w.deployment("web")
	watch, err := client.AppsV1().Deployments("shop").Watch(w.t.Context(), metav1.ListOptions{ResourceVersion: last.ResourceVersion})
	if err != nil {
		w.t.Fatal(err)
	}
	go func() {
		for event := range watch.ResultChan() {
			d, ok := event.Object.(*appsv1.Deployment)
			if !ok {
				return // the API server ends
			}
			if equality.Semantic.DeepEqual(last.Spec.Template, d.Spec.Template) {
				continue
			}
			last = d
			var m struct{ Hash string }
			if err := json.Unmarshal([]byte(d.Spec.Template.Annotations[compatMark]), &m); err != nil {
				w.t.Errorf("mark %q: %v", d.Spec.Template.Annotations[compatMark], err)
			}
			values = append(values, m.Hash)
		}
	}()
	w.t.Cleanup(watch.Stop)
	return &values
}
