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
		meanwhile func(f *fixture)
		want      []string
	}{
		"the change is still to be made": {
			meanwhile: func(f *fixture) { f.Put(annotated(auto(web, known1), "example.org/touched", "1")) },
			want:      []string{env(known2, "web/"+cmVar, h2), env(known2, "web/"+cmVar, h2)},
		},
		"a second manager has made the change already": {
			meanwhile: func(f *fixture) {
				done := recordedOn(f.deployment("web").ResourceVersion, known2)
				f.Put(auto(pod(reads("app-config"), variableSet(cmVar, h2)), done))
			},
			want: []string{env(known2, "web/"+cmVar, h2)},
		},
		"somebody wrote what it would have written, and the template stays as it is": {
			meanwhile: func(f *fixture) { f.Put(auto(pod(reads("app-config"), variableSet(cmVar, h2)), known2)) },
			want:      []string{env(known2, "web/"+cmVar, h2), envAlone("web/"+cmVar, h2)},
		},
		"the workload opted out": {meanwhile: func(f *fixture) { f.Put(deploy(web, nativeState, known1)) }, want: []string{env(known2, "web/"+cmVar, h2), stateOnly("")}},
		"the workload is gone":   {meanwhile: func(f *fixture) { f.Delete(deploy(web)) }, want: []string{env(known2, "web/"+cmVar, h2)}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, nil, cm1(), auto(web, known1))
				f.once("patch", "deployments", func() { tc.meanwhile(f) })
				changeCM(f)
				f.pass(time.Hour)
				f.expect(tc.want...)
				f.noErrors()
			})
		})
	}
}

func TestConflictWithoutEndIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, nil, cm1(), auto(pod(reads("app-config")), stateOf(cmKey, h1)))
		conflict := apierrors.NewConflict(appsv1.Resource("deployments"), "web", errTryAgain)
		f.refuse("patch", "deployments", slices.Repeat([]error{conflict}, 3*4)...)
		changeCM(f)
		f.pass(time.Minute)
		if got := f.state("web"); got != stateOf(cmKey, h2) {
			t.Errorf("state = %s, want the state of the change", got)
		}
		f.noErrors()
		failed := "Warning ReloadFail Reload for ConfigMap shop/app-config failed: " + conflict.Error()
		f.told("Normal Reloaded Reloaded for ConfigMap shop/app-config", failed, failed, failed)
	})
}

// A webhook may deny a write with any status, including 404, which also means that the workload is
// gone.
func TestNotFoundOfSomethingElseLosesNothing(t *testing.T) {
	known2 := stateOf(cmKey, h2)
	for name, tc := range map[string]struct {
		web    *appsv1.Deployment
		change func(f *fixture)
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
			change: func(f *fixture) { f.Put(deploy(pod(reads("app-config")), kAuto, "true")) }, denied: 4,
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
				f := newFixture(t, nil, cm1(), tc.web)
				denial := apierrors.NewNotFound(schema.GroupResource{Group: "policy.example", Resource: "teams"}, "shop")
				denial.ErrStatus.Message = `admission webhook "teams.example" denied the request: ` + denial.ErrStatus.Message
				f.refuse("patch", "deployments", slices.Repeat([]error{denial}, tc.denied)...)
				tc.change(f)
				f.pass(time.Hour)
				if writes := f.writes(); len(writes) <= tc.denied || writes[len(writes)-1] != tc.want {
					t.Errorf("writes %v; want more than the %d that are denied, and the last to be %s", writes, tc.denied, tc.want)
				}
				f.told(tc.events...)
			})
		})
	}
}

// When the response to a write arrives, there may be another object of that name, of which more is
// known.
func TestLateAnswerIsNotOfTheSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := auto(pod(reads("app-config")), stateOf(cmKey, h1))
		f := newFixture(t, nil, cm1(), web)
		f.Latency(30 * time.Second)
		changeCM(f)
		f.pass(10 * time.Second)
		f.Delete(web)
		successor := deploy(pod(reads("app-config")), kAuto, "true")
		successor.UID = "successor"
		f.Put(successor)
		f.pass(10 * time.Second)
		f.Put(cm("app-config", "color", "green"))
		f.pass(time.Hour)
		want := []corev1.EnvVar{{Name: cmVar, Value: hashOf("color", "green")}}
		if diff := cmp.Diff(want, f.deployment("web").Spec.Template.Spec.Containers[0].Env); diff != "" {
			t.Errorf("mark differs (-want +got):\n%s", diff)
		}
	})
}

// If the state is removed while a reload is being written, it is known from the version that the
// reload was decided on, even if the watch is late.
func TestStateIsRemovedWhileAReloadIsOnItsWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := pod(reads("app-config"))
		f := newFixture(t, nil, cm1(), auto(web, stateOf(cmKey, h1)))
		f.Lag(time.Second, "deployments")
		f.once("patch", "deployments", func() { f.Put(deploy(web, kAuto, "true")) })
		changeCM(f)
		f.pass(time.Hour)
		rolled := env(stateOf(cmKey, h2), "web/"+cmVar, h2)
		f.expect(rolled, rolled)
	})
}

// raceStep is one event; n is drawn from 0 to 2999.
type raceStep struct {
	name string
	n    int
}

var raceSteps = map[string]func(f *fixture, n int){
	"the source changes": func(f *fixture, n int) { f.Put(cm("app-config", "v", fmt.Sprint(n%4))) },
	"the source goes": func(f *fixture, _ int) {
		if c := controllertest.Get[corev1.ConfigMap](f.Host, "shop", "app-config"); c != nil {
			f.Delete(c)
		}
	},
	"somebody touches the workload": func(f *fixture, n int) {
		synctest.Wait() // reading and writing is one step
		f.Put(annotated(f.deployment("web"), "example.org/touched", fmt.Sprint(n)))
	},
	"time passes":                 func(f *fixture, n int) { f.pass(time.Duration(n) * time.Millisecond) },
	"another manager takes over":  func(f *fixture, _ int) { f.Restart() },
	"no manager runs for a while": func(f *fixture, _ int) { f.Restart(func() { f.pass(time.Second) }) },
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
		f := newFixture(t, func(cfg *config) {
			cfg.QuietPeriod = c.quiet
			strategyAnnotations(cfg) // every patch rolls; a variable would hide a second patch
			cfg.ExcludeSources, cfg.ExcludeKinds = []string{"secrets"}, []string{"statefulsets", "daemonsets", "cronjobs", "jobs"}
		}, cm("app-config", "v", "0"), auto(pod(reads("app-config")), known))
		for resource, lag := range c.lags {
			f.Lag(lag, resource)
		}
		f.faults(c.outcomes)
		rolled := f.audit()
		for _, s := range c.steps {
			raceSteps[s.name](f, s.n)
		}
		f.Put(cm("app-config", "v", "final"))
		f.pass(2 * time.Hour) // including back-off
		for i := 1; i < len(*rolled); i++ {
			if (*rolled)[i] == (*rolled)[i-1] {
				problems = append(problems, fmt.Sprintf("rolled twice to the same data: %v", *rolled))
			}
		}
		want := hashOf("v", "final")
		if n := len(*rolled); n == 0 || (*rolled)[n-1] != want {
			problems = append(problems, fmt.Sprintf("the last change is lost: %v", *rolled))
		}
		if got := f.state("web"); got != stateOf(cmKey, want) {
			problems = append(problems, "state at the end is "+got)
		}
	})
	return problems
}

// faults makes patches of Deployments fail, before or after they took effect.
func (f *fixture) faults(outcomes []string) {
	timeout := apierrors.NewTimeoutError("made up", 1)
	f.before("patch", "deployments", func(r controllertest.Request) error {
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
			if err := f.apply(r); err != nil {
				return err
			}
			return timeout
		case "applied late, answer lost":
			time.AfterFunc(1500*time.Millisecond, func() { _ = f.apply(r) })
			return timeout
		}
		return nil
	})
}

// audit collects the hash in the mark each time the pod template changes in the API server.
func (f *fixture) audit() *[]string {
	var values []string
	client, err := kubernetes.NewForConfig(f.RESTConfig())
	if err != nil {
		f.t.Fatal(err)
	}
	last := f.deployment("web")
	watch, err := client.AppsV1().Deployments("shop").Watch(f.t.Context(), metav1.ListOptions{ResourceVersion: last.ResourceVersion})
	if err != nil {
		f.t.Fatal(err)
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
				f.t.Errorf("mark %q: %v", d.Spec.Template.Annotations[compatMark], err)
			}
			values = append(values, m.Hash)
		}
	}()
	f.t.Cleanup(watch.Stop)
	return &values
}
