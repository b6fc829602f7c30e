// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"encoding/hex"
	"encoding/json"
	"errors"
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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clienttesting "k8s.io/client-go/testing"
	"pgregory.net/rapid"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

func TestConflictIsDecidedOnALiveRead(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	web := pod(reads("app-config"))
	body := envBody(known2, "web/"+cmVar, h2)
	delete(body, "metadata")
	variableOnly := "patch deployments/web " + toJSON(body)
	cases := map[string]struct {
		// meanwhile is what somebody writes between the decision and the patch.
		meanwhile func(w *fixture)
		want      []string
	}{
		"the change is still to be made": {
			meanwhile: func(w *fixture) {
				w.put(annotated(deploy(web, kAuto, "true", nativeState, known1), "example.org/touched", "1"))
			},
			want: []string{env(known2, "web/"+cmVar, h2), env(known2, "web/"+cmVar, h2)},
		},
		"another manager made it": {
			meanwhile: func(w *fixture) {
				done := recordedOn(w.deployment("web").ResourceVersion, known2)
				w.put(deploy(pod(reads("app-config"), variableSet(cmVar, h2)), kAuto, "true", nativeState, done))
			},
			want: []string{env(known2, "web/"+cmVar, h2)},
		},
		"somebody wrote what it would have written, and the template stays as it is": {
			meanwhile: func(w *fixture) {
				w.put(deploy(pod(reads("app-config"), variableSet(cmVar, h2)), kAuto, "true", nativeState, known2))
			},
			want: []string{env(known2, "web/"+cmVar, h2), variableOnly},
		},
		"the workload opted out": {
			meanwhile: func(w *fixture) { w.put(deploy(web, nativeState, known1)) },
			want:      []string{env(known2, "web/"+cmVar, h2), stateOnly("")},
		},
		"the workload is gone": {
			meanwhile: func(w *fixture) { w.remove(deploy(web)) },
			want:      []string{env(known2, "web/"+cmVar, h2)},
		},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), deploy(web, kAuto, "true", nativeState, known1))
				done := false
				w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
					if !done {
						done = true
						tc.meanwhile(w)
					}
					return false, nil, nil
				})
				changeCM(w)
				w.pass(time.Hour)
				if diff := cmp.Diff(tc.want, w.writes()); diff != "" {
					t.Errorf("writes differ (-want +got):\n%s", diff)
				}
				if n := w.c.Status().Errors; n != 0 {
					t.Errorf("%d errors, want none: a conflict is no failure", n)
				}
			})
		})
	}
}

func TestConflictWithoutEndIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t, nil, cm1(), deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)))
		w.faults(slices.Repeat([]string{"conflict"}, 3*4))
		changeCM(w)
		w.pass(time.Minute)
		if got := w.state("web"); got != stateOf(cmKey, h2) {
			t.Errorf("state = %s, want the state of the change", got)
		}
		if n := w.c.Status().Errors; n != 0 {
			t.Errorf("%d errors, want none before the fourth reconcile in a row", n)
		}
		failed := `Warning ReloadFail Reload for ConfigMap shop/app-config failed: Operation cannot be fulfilled on deployments.apps "web": made up`
		want := []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config", failed, failed, failed}
		if diff := cmp.Diff(want, w.events()); diff != "" {
			t.Errorf("events differ (-want +got):\n%s", diff)
		}
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
			web:    deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)),
			change: changeCM, denied: 1,
			want:   env(known2, "web/"+cmVar, h2),
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config"},
		},
		"a reload that is denied for longer": {
			web:    deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1)),
			change: changeCM, denied: 4,
			want: env(known2, "web/"+cmVar, h2),
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config",
				`Warning ReloadFail Reload for ConfigMap shop/app-config failed: admission webhook "teams.example" denied the request: teams.policy.example "shop" not found`},
		},
		"the recording of a state": {
			web:    deploy(pod(reads("app-config"))),
			change: func(w *fixture) { w.put(deploy(pod(reads("app-config")), kAuto, "true")) }, denied: 4,
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
			denied: 4,
			want:   resume(),
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t, nil, cm1(), tc.web)
				w.stop()
				w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
					if tc.denied == 0 {
						return false, nil, nil
					}
					tc.denied--
					err := apierrors.NewNotFound(schema.GroupResource{Group: "policy.example", Resource: "teams"}, "shop")
					err.ErrStatus.Message = `admission webhook "teams.example" denied the request: ` + err.ErrStatus.Message
					return true, nil, err
				})
				w.start()
				if tc.change != nil {
					tc.change(w)
				}
				w.pass(time.Hour)
				writes := w.writes()
				if tc.denied != 0 || len(writes) == 0 || writes[len(writes)-1] != tc.want {
					t.Errorf("%d more would have been denied, writes %v; want the last to be %s", tc.denied, writes, tc.want)
				}
				if diff := cmp.Diff(tc.events, w.events()); diff != "" {
					t.Errorf("events differ (-want +got):\n%s", diff)
				}
			})
		})
	}
}

// When the response to a write arrives, there may be another object of that name, of which more is
// known.
func TestLateAnswerIsNotOfTheSuccessor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		web := deploy(pod(reads("app-config")), kAuto, "true", nativeState, stateOf(cmKey, h1))
		w := newFixture(t, nil, cm1(), web)
		late := false
		w.client.PrependReactor("patch", "deployments", func(a clienttesting.Action) (bool, runtime.Object, error) {
			if late {
				return false, nil, nil
			}
			late = true
			if err := w.apply(a); err != nil {
				return true, nil, err
			}
			applied := w.deployment("web")
			w.pass(10 * time.Second)
			w.remove(web)
			successor := deploy(pod(reads("app-config")), kAuto, "true")
			successor.UID = "successor"
			w.put(successor)
			w.pass(10 * time.Second)
			w.put(cm("app-config", "color", "green"))
			w.pass(10 * time.Second)
			return true, applied, nil
		})
		changeCM(w)
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
		w := newLaggingFixture(t, map[string]time.Duration{"deployments": time.Second}, nil,
			cm1(), deploy(web, kAuto, "true", nativeState, stateOf(cmKey, h1)))
		w.pass(time.Minute)
		removed := false
		w.client.PrependReactor("patch", "deployments", func(clienttesting.Action) (bool, runtime.Object, error) {
			if !removed {
				removed = true
				w.put(deploy(web, kAuto, "true"))
			}
			return false, nil, nil
		})
		changeCM(w)
		w.pass(time.Hour)
		known2 := stateOf(cmKey, h2)
		if diff := cmp.Diff([]string{env(known2, "web/"+cmVar, h2), env(known2, "web/"+cmVar, h2)}, w.writes()); diff != "" {
			t.Errorf("writes differ (-want +got):\n%s", diff)
		}
	})
}

// raceStep is one event; n is drawn from 0 to 2999.
type raceStep struct {
	name string
	n    int
}

var raceSteps = map[string]func(w *fixture, n int){
	"the source changes": func(w *fixture, n int) { w.put(cm("app-config", "v", fmt.Sprint(n%4))) },
	"the source goes": func(w *fixture, _ int) {
		if _, err := w.client.Tracker().Get(cmResource, "shop", "app-config"); err == nil {
			w.remove(cm("app-config"))
		}
	},
	"somebody touches the workload": func(w *fixture, n int) {
		synctest.Wait() // reading and writing is one step
		w.put(annotated(w.deployment("web"), "example.org/touched", fmt.Sprint(n)))
	},
	"time passes":                 func(w *fixture, n int) { w.pass(time.Duration(n) * time.Millisecond) },
	"another manager takes over":  func(w *fixture, _ int) { w.restart() },
	"no manager runs for a while": func(w *fixture, _ int) { w.stop(); w.pass(time.Second) },
}

// In any order of events and with any outcome of requests, no change is lost and none rolls twice.
func TestChangesRollExactlyOnce(t *testing.T) {
	step := rapid.Custom(func(t *rapid.T) raceStep {
		return raceStep{rapid.SampledFrom(slices.Sorted(maps.Keys(raceSteps))).Draw(t, "name"), rapid.IntRange(0, 2999).Draw(t, "n")}
	})
	outcome := rapid.SampledFrom([]string{"success", "success", "success", "conflict", "429", "time-out", "applied, answer lost", "applied late, answer lost"})
	rapid.Check(t, func(rt *rapid.T) {
		quiet := rapid.SampledFrom([]time.Duration{0, time.Second}).Draw(rt, "quiet period")
		steps := rapid.SliceOfN(step, 1, 25).Draw(rt, "steps")
		outcomes := rapid.SliceOfN(outcome, 0, 20).Draw(rt, "outcomes of patches")
		lag := rapid.SampledFrom([]time.Duration{0, 0, 10 * time.Millisecond, 700 * time.Millisecond})
		lags := map[string]time.Duration{"configmaps": lag.Draw(rt, "lag of sources"), "deployments": lag.Draw(rt, "lag of workloads")}
		for _, problem := range race(t, quiet, steps, outcomes, lags) {
			rt.Error(problem)
		}
	})
}

// race returns the problems found at the end.
func race(t *testing.T, quiet time.Duration, steps []raceStep, outcomes []string, lags map[string]time.Duration) (problems []string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		initial, final := cm("app-config", "v", "0"), cm("app-config", "v", "final")
		known := stateOf(cmKey, hex.EncodeToString(policy.DigestConfigMap(initial)))
		// By annotation, every patch rolls; a variable would hide a second patch.
		w := newLaggingFixture(t, lags, func(c *Config) { c.QuietPeriod = quiet; strategyAnnotations(c) },
			initial, deploy(pod(reads("app-config")), kAuto, "true", nativeState, known))
		w.faults(outcomes)
		rolled := w.audit()
		for _, s := range steps {
			if w.stopped() {
				w.start()
			}
			raceSteps[s.name](w, s.n)
		}
		if w.stopped() {
			w.start()
		}
		w.put(final)
		w.pass(24 * time.Hour) // including back-off
		for i := 1; i < len(*rolled); i++ {
			if (*rolled)[i] == (*rolled)[i-1] {
				problems = append(problems, fmt.Sprintf("rolled twice to the same data: %v", *rolled))
			}
		}
		want := hex.EncodeToString(policy.DigestConfigMap(final))
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
	w.client.PrependReactor("patch", "deployments", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if len(outcomes) == 0 {
			return false, nil, nil
		}
		outcome := outcomes[0]
		outcomes = outcomes[1:]
		switch outcome {
		case "conflict":
			return true, nil, apierrors.NewConflict(a.GetResource().GroupResource(), "web", errors.New("made up"))
		case "429":
			return true, nil, apierrors.NewTooManyRequests("made up", 2)
		case "time-out":
			return true, nil, apierrors.NewTimeoutError("made up", 1)
		case "applied, answer lost":
			if err := w.apply(a); err != nil {
				return true, nil, err
			}
			return true, nil, apierrors.NewTimeoutError("made up", 1)
		case "applied late, answer lost":
			time.AfterFunc(1500*time.Millisecond, func() { _ = w.apply(a) })
			return true, nil, apierrors.NewTimeoutError("made up", 1)
		}
		return false, nil, nil
	})
}

// apply applies a patch, bypassing the faults.
func (w *fixture) apply(a clienttesting.Action) error {
	for _, r := range w.client.ReactionChain[1:] {
		if !r.Handles(a) {
			continue
		}
		if handled, _, err := r.React(a); handled {
			return err
		}
	}
	return errors.New("nobody handled the patch")
}

// audit collects the hash in the mark each time the pod template changes in the API server.
func (w *fixture) audit() *[]string {
	var values []string
	watch, err := w.client.Tracker().Watch(deploymentResource, "shop")
	if err != nil {
		w.t.Fatal(err)
	}
	last := w.deployment("web").Spec.Template
	go func() {
		for event := range watch.ResultChan() {
			d := event.Object.(*appsv1.Deployment)
			if equality.Semantic.DeepEqual(last, d.Spec.Template) {
				continue
			}
			last = *d.Spec.Template.DeepCopy()
			var m struct{ Hash string }
			if err := json.Unmarshal([]byte(last.Annotations[compatMark]), &m); err != nil {
				w.t.Errorf("mark %q: %v", last.Annotations[compatMark], err)
			}
			values = append(values, m.Hash)
		}
	}()
	w.t.Cleanup(watch.Stop)
	return &values
}
