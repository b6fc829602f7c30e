// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// Annotation keys of the original, spelled out as users write them.
const (
	kAuto      = "reloader.stakater.com/auto"
	kCM        = "configmap.reloader.stakater.com/reload"
	kSecret    = "secret.reloader.stakater.com/reload"
	kCMAuto    = "configmap.reloader.stakater.com/auto"
	kSearch    = "reloader.stakater.com/search"
	kMatch     = "reloader.stakater.com/match"
	kIgnore    = "reloader.stakater.com/ignore"
	kCMExclude = "configmaps.exclude.reloader.stakater.com/reload"
	kPause     = "deployment.reloader.stakater.com/pause-period"
	kPausedAt  = "deployment.reloader.stakater.com/paused-at"
)

// started is the second at which every test's bubble begins.
const started = 946684800

// objs are the objects at the start.
type objs = []runtime.Object

// reconcileCase is one row: the objects at the start, what then happens, and the complete list of
// resulting writes and Events. Without events, a row that rolls has the Event of a reload for app-config.
type reconcileCase struct {
	configure func(*config)
	objects   objs
	change    func(f *fixture)
	want      []string
	events    []string
}

func runCases(t *testing.T, cases map[string]reconcileCase) {
	t.Helper()
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, tc.configure, tc.objects...)
				if tc.change != nil {
					tc.change(f)
				}
				f.pass(2 * time.Second)
				f.told(eventsOf(tc.want, tc.events)...)
				// Nothing may be left to do, neither later nor after a restart.
				f.pass(20 * time.Minute)
				f.Restart()
				f.pass(time.Minute)
				f.expect(tc.want...)
			})
		})
	}
}

const reloaded = "Normal Reloaded Reloaded for ConfigMap shop/app-config"

func eventsOf(want, events []string) []string {
	rolls := func(write string) bool {
		return strings.Contains(write, `"template":`) || strings.Contains(write, `"restartAt":`) || strings.HasPrefix(write, "create ")
	}
	if events == nil && slices.ContainsFunc(want, rolls) {
		return []string{reloaded}
	}
	return events
}

func strategyAnnotations(c *config) { c.Strategy = policy.StrategyAnnotations }
func autoAll(c *config)             { c.AutoAll = true }
func onCreate(c *config)            { c.OnCreate = true }
func onDelete(c *config)            { c.OnDelete = true }

func changeCM(f *fixture) { f.Put(cm2()) }
func changeDB(f *fixture) { f.Put(db2()) }
func deleteCM(f *fixture) { f.Delete(cm1()) }

func TestReconcileAnnotations(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	rolled := []string{env(known2, "web/"+cmVar, h2)}
	web := pod(reads("app-config"))

	// one returns a row with the Deployment web that reads app-config, which changes.
	one := func(annotations []string, want []string) reconcileCase {
		tc := reconcileCase{
			objects: objs{cm1(), deploy(web, append(annotations, nativeState, known1)...)},
			change:  changeCM, want: want,
		}
		return tc
	}
	with := func(tc reconcileCase, configure func(*config)) reconcileCase {
		tc.configure = configure
		return tc
	}

	runCases(t, map[string]reconcileCase{
		"auto rolls on a change": one([]string{kAuto, "true"}, rolled),
		"auto rolls by annotation under that strategy": with(one([]string{kAuto, "true"}, []string{ann(known2, compatMark,
			`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":"`+h2+`","containerRefs":["web"],"observedAt":`+fmt.Sprint(started+1)+`}`)}),
			strategyAnnotations),
		"without compatibility the original's annotations mean nothing": {
			configure: func(c *config) { c.Compat = false },
			objects:   objs{cm1(), deploy(web, kAuto, "true")}, change: changeCM,
		},
		"a label of the source is no change": {
			objects: objs{cm1(), auto(web, known1)},
			change: func(f *fixture) {
				labelled := cm1()
				labelled.Labels = map[string]string{"tier": "web"}
				f.Put(labelled)
			},
		},
		"auto demands a reference": {objects: objs{cm1(), deploy(pod(), kAuto, "true")}, change: changeCM},
		"a named source needs no reference, and marks the first container": {
			objects: objs{cm1(), deploy(pod(containersNamed("a", "b")), kCM, "app-config", nativeState, known1)},
			change:  changeCM, want: []string{env(known2, "a/"+cmVar, h2)},
		},
		"items are regular expressions, trimmed": one([]string{kCM, "[x], app-.*"}, rolled),
		"an item that does not compile is reported, and the others count": {
			objects: objs{cm1(), deploy(web, kCM, "[, app-config", nativeState, known1)},
			change:  changeCM, want: rolled,
			events: []string{reloaded, "Warning InvalidReloadAnnotation " + kCM + `: item "[": error parsing regexp: missing closing ]: ` + "`[$`"},
		},
		"several items that do not compile are one Event": {
			objects: objs{deploy(web, kCM, "[, (", kAuto, "false")},
			events: []string{"Warning InvalidReloadAnnotation " + kCM + `: item "[": error parsing regexp: missing closing ]: ` +
				"`[$`" + `; item "(": error parsing regexp: missing closing ): ` + "`^($`"},
		},
		"annotations of the template count if the workload has none": {
			objects: objs{cm1(), deploy(pod(reads("app-config"), onTemplate(kAuto, "true")), nativeState, known1)},
			change:  changeCM, want: rolled,
		},
		"the fall-back to the template is decided for each type": {
			objects: objs{cm1(), db1(), deploy(pod(reads("app-config"), readsSecret("db"), onTemplate(kAuto, "true")),
				kSecret, "db", nativeState, stateOf(cmKey, h1, dbKey, p1))},
			change: changeCM, want: []string{env(stateOf(cmKey, h2, dbKey, p1), "web/"+cmVar, h2)},
		},
		"the presence of a key on the workload stops the fall-back": {
			objects: objs{cm1(), deploy(pod(reads("app-config"), onTemplate(kAuto, "true")), kAuto, "")},
			change:  changeCM,
		},
		"auto=false vetoes no named source": one([]string{kAuto, "false", kCM, "app-config"}, rolled),
		"an ignored source is dropped from the state and rolls nothing": {
			objects: objs{annotated(cm1(), kIgnore, "true"), auto(web, known1)},
			change:  func(f *fixture) { f.Put(annotated(cm2(), kIgnore, "true")) },
			want:    []string{stateOnly("")},
		},
		"the native annotation ignores a source as well": {
			objects: objs{annotated(cm1(), nativeReload, "off"), auto(web, known1)},
			change:  func(f *fixture) { f.Put(annotated(cm2(), nativeReload, "off")) },
			want:    []string{stateOnly("")},
		},
		"ignore must be exactly true": {
			objects: objs{annotated(cm1(), kIgnore, "True"), auto(web, known1)},
			change:  func(f *fixture) { f.Put(annotated(cm2(), kIgnore, "True")) },
			want:    rolled,
		},
		"an exclusion beats a named match": one([]string{kCM, "app-config", kCMExclude, "other, app-config"}, []string{stateOnly("")}),
		"an exclusion on the template does not count": {
			objects: objs{cm1(), deploy(pod(reads("app-config"), onTemplate(kCMExclude, "app-config")), kCM, "app-config", nativeState, known1)},
			change:  changeCM, want: rolled,
		},
		"search rolls for a source with match": {
			objects: objs{annotated(cm1(), kMatch, "true"), deploy(web, kSearch, "true", nativeState, known1)},
			change:  func(f *fixture) { f.Put(annotated(cm2(), kMatch, "true")) },
			want:    rolled,
		},
		"search leaves a source without match":                 {objects: objs{cm1(), deploy(web, kSearch, "true")}, change: changeCM},
		"auto-all rolls a workload without annotations":        with(one(nil, rolled), autoAll),
		"auto-all leaves one that opts out":                    with(one([]string{kAuto, "no"}, []string{stateOnly("")}), autoAll),
		"search does not switch auto-all off":                  with(one([]string{kSearch, "true"}, rolled), autoAll),
		"the typed auto opts out of auto-all":                  with(one([]string{kCMAuto, "0"}, []string{stateOnly("")}), autoAll),
		"an empty value does not opt out":                      with(one([]string{kAuto, ""}, rolled), autoAll),
		"auto understands what ParseBool does":                 one([]string{kAuto, "T"}, rolled),
		"the typed auto alone rolls":                           one([]string{kCMAuto, "1"}, rolled),
		"a type that is ignored by flag is not watched at all": with(one([]string{kAuto, "true"}, []string{stateOnly("")}), func(c *config) { c.ExcludeSources = []string{"ConfigMaps"} }),
		"a kind that is ignored by flag is left alone":         with(one([]string{kAuto, "true"}, nil), func(c *config) { c.ExcludeKinds = []string{"Deployments"} }),
		"another key can stand for an annotation": with(one([]string{"example.org/auto", "true"}, rolled),
			func(c *config) { c.AnnotationKeys = map[string]string{"auto": "example.org/auto"} }),
	})
}

func TestReconcileReferences(t *testing.T) {
	known1, known2 := stateOf(cmKey, h1), stateOf(cmKey, h2)
	volume := func(source corev1.VolumeSource) podOption {
		return func(t *corev1.PodTemplateSpec) {
			t.Spec.Volumes = append(t.Spec.Volumes, corev1.Volume{Name: "v", VolumeSource: source})
		}
	}
	ofCM := corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "app-config"}}}
	projected := corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
		{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "other"}}},
		{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "app-config"}}},
	}}}
	mounted := func(i int) podOption {
		return func(t *corev1.PodTemplateSpec) {
			t.Spec.Containers[i].VolumeMounts = []corev1.VolumeMount{{Name: "v", MountPath: "/etc/app"}}
		}
	}
	inInit := func(c corev1.Container) podOption {
		return func(t *corev1.PodTemplateSpec) { t.Spec.InitContainers = []corev1.Container{c} }
	}
	row := func(state1, state2 string, container string, options ...podOption) reconcileCase {
		tc := reconcileCase{
			objects: objs{cm1(), auto(pod(options...), state1)},
			change:  changeCM,
		}
		if container != "" {
			tc.want = []string{env(state2, container+"/"+cmVar, h2)}
		} else {
			tc.want = []string{stateOnly("")}
		}
		return tc
	}
	withOther1, withOther2 := stateOf(cmKey, h1, "secret/other", ""), stateOf(cmKey, h2, "secret/other", "")
	runCases(t, map[string]reconcileCase{
		"a projected source of a volume that the second container mounts": row(withOther1, withOther2, "b",
			containersNamed("a", "b"), volume(projected), mounted(1)),
		"a volume that only an init container mounts marks the first container": row(known1, known2, "a",
			containersNamed("a", "b"), volume(ofCM),
			inInit(corev1.Container{Name: "init", VolumeMounts: []corev1.VolumeMount{{Name: "v"}}})),
		"a volume that nobody mounts is no reference": row(known1, "", "", containersNamed("a"), volume(ofCM)),
		"a mount beats an environment": row(known1, known2, "b",
			containersNamed("web", "b"), reads("app-config"), volume(ofCM), mounted(1)),
		"a mount in an init container beats an environment": row(known1, known2, "a", containersNamed("a", "b"), volume(ofCM),
			inInit(corev1.Container{Name: "init", VolumeMounts: []corev1.VolumeMount{{Name: "v"}}}),
			func(t *corev1.PodTemplateSpec) {
				t.Spec.Containers[1].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: "app-config"}}}}
			}),
		"an environment of an init container marks the first container": row(known1, known2, "a", containersNamed("a", "b"),
			inInit(corev1.Container{Name: "init", Env: []corev1.EnvVar{{Name: "X", ValueFrom: &corev1.EnvVarSource{
				ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "app-config"}, Key: "color"}}}}})),
		"image pull secrets are no reference": {
			objects: objs{db1(), deploy(pod(func(t *corev1.PodTemplateSpec) {
				t.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: "db"}}
			}), kAuto, "true")},
			change: changeDB,
		},
	})
}

func TestDryRunWritesNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := deploy(pod(reads("app-config")), kAuto, "true", kPause, "5m", nativeState, stateOf(cmKey, h1))
		paused := deploy(pod(), kPausedAt, "yesterday")
		paused.Name, paused.Spec.Paused = "api", true
		f := newFixture(t, func(c *config) { c.DryRun = true }, cm1(), d, paused)
		changeCM(f)
		f.pass(time.Minute)
		f.told("Normal WouldReload Would reload for ConfigMap shop/app-config")
		// It is decided on again, with nothing new.
		f.Put(annotated(d.DeepCopy(), "example.org/touched", "1"))
		f.pass(time.Minute)
		f.Put(cm1())
		f.pass(time.Minute)
		f.told("Normal WouldReload Would reload for ConfigMap shop/app-config")
		f.expect()
		f.count(2, "reloads_total", "result", "dry_run")
	})
}

func TestVariableOfTwoSourcesHasTheLaterChange(t *testing.T) {
	// app.config and app-config share a variable. The later change sets it, and the state
	// distinguishes them.
	dotted := func(v string) runtime.Object { return cm("app.config", "v", v) }
	hash := func(v string) string { return hashOf("v", v) }
	state := func(cmHash, dottedHash string) string {
		return stateOf(cmKey, cmHash, "configmap/app.config", dottedHash)
	}
	runCases(t, map[string]reconcileCase{
		"the later change stands": {
			objects: objs{cm1(), dotted("1"), auto(pod(reads("app-config"), reads("app.config")), state(h1, hash("1")))},
			change:  func(f *fixture) { f.Put(dotted("2")); f.pass(100 * time.Millisecond); changeCM(f) },
			want:    []string{env(state(h2, hash("2")), "web/"+cmVar, h2)},
			events:  []string{"Normal Reloaded Reloaded for ConfigMap shop/app.config, ConfigMap shop/app-config"},
		},
		"two sources change at one instant, and the first by type and name stands": {
			objects: objs{cm1(), dotted("1"), auto(pod(reads("app-config"), reads("app.config")), state(h1, hash("1")))},
			change:  func(f *fixture) { f.Put(dotted("2"), cm2()) },
			want:    []string{env(state(h2, hash("2")), "web/"+cmVar, h2)},
			events:  []string{"Normal Reloaded Reloaded for ConfigMap shop/app.config, ConfigMap shop/app-config"},
		},
		"two sources come to equal data, and the later one leaves the template as it is": {
			objects: objs{cm1(), dotted("1"), auto(pod(reads("app-config"), reads("app.config")), state(h1, hash("1")))},
			change:  func(f *fixture) { f.Put(dotted("2")); f.pass(time.Minute); f.Put(cm("app-config", "v", "2")) },
			want: []string{env(state(h1, hash("2")), "web/"+cmVar, hash("2")),
				env(state(hash("2"), hash("2")), "web/"+cmVar, hash("2"))},
			events: []string{"Normal Reloaded Reloaded for ConfigMap shop/app-config", "Normal Reloaded Reloaded for ConfigMap shop/app.config"},
		},
	})
}
