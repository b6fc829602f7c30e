// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
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

// startSecond is the second at which every test's bubble begins.
const startSecond = 946684800

// objectList are the objects at the start.
type objectList = []runtime.Object

// reconcileCase is one row: the objects at the start, what then happens, and the complete list of
// resulting writes and Events. Without objects, there are app-config and the Deployment that rolls for it.
// Without events, a row that rolls has the Event of a reload for app-config.
type reconcileCase struct {
	configure func(*config)
	objects   objectList
	change    func(f *fixture)
	want      []string
	events    []string
}

// newCase returns a row with these objects. Its Events are those of a reload unless it has others.
func newCase(objects objectList, change func(f *fixture), want []string, events ...string) reconcileCase {
	return reconcileCase{objects: objects, change: change, want: want, events: events}
}

func (tc reconcileCase) withConfig(configure func(*config)) reconcileCase {
	tc.configure = configure
	return tc
}

func runCases(t *testing.T, cases map[string]reconcileCase) {
	t.Helper()
	bubbles(t, cases, func(t bubble, tc reconcileCase) {
		if tc.objects == nil {
			tc.objects = objectList{cm1(), autoWeb(web, state1)}
		}
		f := newFixture(t.T, tc.configure, tc.objects...)
		if tc.change != nil {
			tc.change(f)
		}
		f.advance(2 * time.Second).expectEvents(eventsOf(tc.want, tc.events)...)
		// Nothing may be left to do, neither later nor after a restart.
		f.advance(20 * time.Minute)
		f.Restart()
		f.advance(time.Minute).expectWrites(tc.want...)
	})
}

// bubble is the test of a row, in fake time of its own.
type bubble struct{ *testing.T }

func bubbles[T any](t *testing.T, rows map[string]T, run func(t bubble, row T)) {
	t.Helper()
	for name, row := range rows {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) { run(bubble{t}, row) })
		})
	}
}

const (
	reloadedEvent     = "Normal Reloaded Reloaded for ConfigMap shop/app-config"
	reloadedBothEvent = reloadedEvent + ", Secret shop/db"
	failedEvent       = "Warning ReloadFail Reload for ConfigMap shop/app-config failed: "
	notRecordedEvent  = "Warning ReloadStateFail The state of its sources could not be recorded, so a change while no manager runs may be missed: "
	invalidEvent      = "Warning InvalidReloadAnnotation "
)

func eventsOf(want, events []string) []string {
	rolls := func(write string) bool {
		return strings.Contains(write, `"template":`) || strings.Contains(write, `"restartAt":`) || strings.HasPrefix(write, "create ")
	}
	if events == nil && slices.ContainsFunc(want, rolls) {
		return []string{reloadedEvent}
	}
	return events
}

func strategyAnnotations(c *config) { c.Strategy = policy.StrategyAnnotations }
func autoAll(c *config)             { c.AutoAll = true }
func onCreate(c *config)            { c.OnCreate = true }
func onDelete(c *config)            { c.OnDelete = true }
func withoutCompat(c *config)       { c.Compat = false }

func changeCM(f *fixture) { f.Put(cm2()) }
func changeDB(f *fixture) { f.Put(db2()) }
func deleteCM(f *fixture) { f.Delete(cm1()) }

func TestReconcileObeysAnnotations(t *testing.T) {
	unrecorded := []string{statePatch("")}
	// row returns a row with a Deployment that has recorded app-config, which changes.
	row := func(want []string, template corev1.PodTemplateSpec, annotations ...string) reconcileCase {
		return reconcileCase{objects: objectList{cm1(), deploy(template, append(annotations, nativeState, state1)...)}, change: changeCM, want: want}
	}
	// webRow is row with the template web.
	webRow := func(want []string, annotations ...string) reconcileCase { return row(want, web, annotations...) }
	// sourceRow is webRow with kAuto, if app-config has an annotation.
	sourceRow := func(want []string, key, value string) reconcileCase {
		return reconcileCase{
			objects: objectList{annotated(cm1(), key, value), autoWeb(web, state1)},
			change:  func(f *fixture) { f.Put(annotated(cm2(), key, value)) }, want: want,
		}
	}

	runCases(t, map[string]reconcileCase{
		"without compatibility the original's annotations mean nothing, and it is not looked for": newCase(objectList{cm1(), deploy(web, kAuto, "true")},
			func(f *fixture) { changeCM(f); f.expectRequests(map[string]int{}) }, nil).withConfig(withoutCompat),
		"auto demands a reference": {objects: objectList{cm1(), deploy(pod(), kAuto, "true")}, change: changeCM},
		"a named source needs no reference, and marks the first container": row([]string{envPatch(state2, "a/"+cmVar, hash2)},
			pod(containersNamed("a", "b")), kCM, "app-config"),
		"items are regular expressions, trimmed": webRow(rollPatches, kCM, "[x], app-.*"),
		"an item that does not compile is reported, and the others count": newCase(objectList{cm1(), deploy(web, kCM, "[, app-config", nativeState, state1)}, changeCM,
			rollPatches, reloadedEvent, invalidEvent+kCM+`: item "[": error parsing regexp: missing closing ]: `+"`[$`"),
		"several items that do not compile are one Event": newCase(objectList{deploy(web, kCM, "[, (", kAuto, "false")}, nil,
			nil, invalidEvent+kCM+`: item "[": error parsing regexp: missing closing ]: `+"`[$`"+`; item "(": error parsing regexp: missing closing ): `+"`^($`"),
		"annotations of the template count if the workload has none": row(rollPatches, pod(reads("app-config"), onTemplate(kAuto, "true"))),
		"the fall-back to the template is decided for each type": newCase(objectList{cm1(), db1(), deploy(pod(reads("app-config"), readsSecret("db"), onTemplate(kAuto, "true")), kSecret, "db", nativeState, stateOf(cmKey, hash1, dbKey, dbHash1))}, changeCM,
			[]string{envPatch(stateOf(cmKey, hash2, dbKey, dbHash1), "web/"+cmVar, hash2)}),
		"the presence of a key on the workload stops the fall-back":     row(unrecorded, pod(reads("app-config"), onTemplate(kAuto, "true")), kAuto, ""),
		"auto=false vetoes no named source":                             webRow(rollPatches, kAuto, "false", kCM, "app-config"),
		"an ignored source is dropped from the state and rolls nothing": sourceRow(unrecorded, kIgnore, "true"),
		"the native annotation ignores a source as well":                sourceRow(unrecorded, nativeReload, "off"),
		"ignore must be exactly true":                                   sourceRow(rollPatches, kIgnore, "True"),
		"an exclusion beats a named match":                              webRow(unrecorded, kCM, "app-config", kCMExclude, "other, app-config"),
		"an exclusion on the template does not count":                   row(rollPatches, pod(reads("app-config"), onTemplate(kCMExclude, "app-config")), kCM, "app-config"),
		"search rolls for a source with match": newCase(objectList{annotated(cm1(), kMatch, "true"), deploy(web, kSearch, "true", nativeState, state1)}, func(f *fixture) { f.Put(annotated(cm2(), kMatch, "true")) },
			rollPatches),
		"auto-all rolls a workload without annotations":        webRow(rollPatches).withConfig(autoAll),
		"auto-all leaves one that opts out":                    webRow(unrecorded, kAuto, "no").withConfig(autoAll),
		"search does not switch auto-all off":                  webRow(rollPatches, kSearch, "true").withConfig(autoAll),
		"the typed auto opts out of auto-all":                  webRow(unrecorded, kCMAuto, "0").withConfig(autoAll),
		"an empty value does not opt out":                      webRow(rollPatches, kAuto, "").withConfig(autoAll),
		"auto understands what ParseBool does":                 webRow(rollPatches, kAuto, "T"),
		"the typed auto alone rolls":                           webRow(rollPatches, kCMAuto, "1"),
		"a type that is ignored by flag is not watched at all": webRow(unrecorded, kAuto, "true").withConfig(func(c *config) { c.ExcludeSources = []string{"ConfigMaps"} }),
		"a kind that is ignored by flag is left alone":         webRow(nil, kAuto, "true").withConfig(func(c *config) { c.ExcludeKinds = []string{"Deployments"} }),
		"another key can stand for an annotation": webRow(rollPatches, "example.org/auto", "true").withConfig(
			func(c *config) { c.AnnotationKeys = map[string]string{"auto": "example.org/auto"} }),

		// native annotations
		"native annotations beat the others and mark by annotation": newCase(objectList{cm1(), db1(), deploy(pod(reads("app-config"), readsSecret("db")), nativeReload, "auto,!secret/db", kAuto, "false", nativeState, state1)}, func(f *fixture) { changeDB(f); f.advance(time.Minute); changeCM(f) },
			[]string{annotationPatch(state2, nativeMark, hash2, 61)}),
		"off beats auto-all":                                 webRow(unrecorded, nativeReload, "off").withConfig(autoAll),
		"native annotations count without compatibility":     webRow([]string{annotationPatch(state2, nativeMark, hash2, 1)}, nativeReload, "auto").withConfig(withoutCompat),
		"a glob names sources that nobody references":        row([]string{annotationPatch(state2, nativeMark, hash2, 1)}, pod(), nativeReload, "configmap/app-*"),
		"a dot in a glob is a dot":                           row(unrecorded, pod(), nativeReload, "configmap/app.*"),
		"never wins over a glob":                             webRow(unrecorded, nativeReload, "!configmap/app-*, configmap/*, auto"),
		"native annotations leave old variables as they are": row([]string{annotationPatch(state2, nativeMark, hash2, 1)}, marked(hash1), nativeReload, "auto"),
		"the template's native annotation counts if the workload has none": row([]string{annotationPatch(state2, nativeMark, hash2, 1)},
			pod(reads("app-config"), onTemplate(nativeReload, "configmap/app-config"))),
		"an item that is no good is reported once, and the others count": newCase(objectList{cm1(), deploy(web, nativeReload, "auto, pod/x", nativeState, state1)}, func(f *fixture) { f.advance(time.Minute); changeCM(f) },
			[]string{annotationPatch(state2, nativeMark, hash2, 61)}, reloadedEvent, invalidEvent+nativeReload+`: item "pod/x": is none of off, auto, TYPE/NAME, !TYPE/NAME with TYPE configmap, secret or secretproviderclass`),
		"a delay of its own replaces the quiet period, and stretches the longest one": newCase(objectList{cm1(), deploy(web, nativeReload, "auto", nativeDelay, "1m", nativeState, state1)}, func(f *fixture) { changeCM(f); f.advance(59 * time.Second); f.expectWriteCount(0) },
			[]string{annotationPatch(state2, nativeMark, hash2, 60)}),
		"a delay that is no good is reported": newCase(objectList{deploy(pod(), nativeReload, "off", nativeDelay, "0s")}, nil,
			nil, invalidEvent+nativeDelay+`: "0s" is not a positive duration`),
	})
}

func TestReconcileMarksTheContainerThatRefers(t *testing.T) {
	named := corev1.LocalObjectReference{Name: "app-config"}
	volume := func(source corev1.VolumeSource) podOption {
		return func(t *corev1.PodTemplateSpec) { t.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
	}
	cmVolume := volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: named}})
	mounts := []corev1.VolumeMount{{Name: "v", MountPath: "/etc/app"}}
	ab := containersNamed("a", "b")
	mounted := func(t *corev1.PodTemplateSpec) { t.Spec.Containers[1].VolumeMounts = mounts }
	initContainer := func(c corev1.Container) podOption {
		return func(t *corev1.PodTemplateSpec) { t.Spec.InitContainers = []corev1.Container{c} }
	}
	mountedInInit := initContainer(corev1.Container{Name: "init", VolumeMounts: mounts})
	// row has a Deployment that has recorded app-config, and is marked in this container.
	row := func(container string, options ...podOption) reconcileCase {
		return reconcileCase{objects: objectList{cm1(), autoWeb(pod(options...), state1)}, change: changeCM, want: []string{envPatch(state2, container+"/"+cmVar, hash2)}}
	}
	runCases(t, map[string]reconcileCase{
		"a volume that only an init container mounts marks the first container": row("a", ab, cmVolume, mountedInInit),
		"a volume that nobody mounts is no reference":                           {objects: objectList{cm1(), autoWeb(pod(ab, cmVolume), state1)}, change: changeCM, want: []string{statePatch("")}},
		"a mount beats an environment":                                          row("b", ab, reads("app-config"), cmVolume, mounted),
		"a mount in an init container beats an environment": row("a", ab, cmVolume, mountedInInit, func(t *corev1.PodTemplateSpec) {
			t.Spec.Containers[1].EnvFrom = []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: named}}}
		}),
		"an environment of an init container marks the first container": row("a", ab, initContainer(corev1.Container{Name: "init", Env: []corev1.EnvVar{{
			Name: "X", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: named, Key: "color"}}}}})),
		"a variable of a source without a name, which the API server takes, is no reference": row("web", reads("app-config"), reads("")),
	})
}

// The names app.config and app-config have the same variable. The state distinguishes them.
func TestVariableOfTwoSourcesHasTheLaterChange(t *testing.T) {
	dotted := func(v string) runtime.Object { return cm("app.config", "v", v) }
	hash := func(v string) string { return hashOf("v", v) }
	state := func(cmHash, dottedHash string) string {
		return stateOf(cmKey, cmHash, "configmap/app.config", dottedHash)
	}
	// row has a Deployment that refers to both.
	row := func(change func(f *fixture), want []string, events ...string) reconcileCase {
		return reconcileCase{
			objects: objectList{cm1(), dotted("1"), autoWeb(pod(reads("app-config"), reads("app.config")), state(hash1, hash("1")))},
			change:  change, want: want, events: events,
		}
	}
	both := []string{envPatch(state(hash2, hash("2")), "web/"+cmVar, hash2)}
	const reloadedInOrder = "Normal Reloaded Reloaded for ConfigMap shop/app.config, ConfigMap shop/app-config"
	runCases(t, map[string]reconcileCase{
		"the later change stands": row(func(f *fixture) { f.Put(dotted("2")); f.advance(100 * time.Millisecond); changeCM(f) }, both, reloadedInOrder),
		"two sources change at one instant, and the first by type and name stands": row(func(f *fixture) { f.Put(dotted("2"), cm2()) }, both, reloadedInOrder),
		"two sources come to equal data, and the later one leaves the template as it is": row(
			func(f *fixture) { f.Put(dotted("2")); f.advance(time.Minute); f.Put(cm("app-config", "v", "2")) },
			[]string{envPatch(state(hash1, hash("2")), "web/"+cmVar, hash("2")), envPatch(state(hash("2"), hash("2")), "web/"+cmVar, hash("2"))},
			reloadedEvent, "Normal Reloaded Reloaded for ConfigMap shop/app.config"),
	})
}

func TestReconcileStaysInItsScope(t *testing.T) {
	const would = "Normal WouldReload Would reload for ConfigMap shop/app-config"
	paused := deploy(pod(), kPausedAt, "yesterday")
	paused.Name, paused.Spec.Paused = "api", true
	namespace := func() *corev1.Namespace { return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop"}} }
	selector := func(items ...string) func(*config) { return func(c *config) { c.NamespaceSelector = items } }
	workedIn := func(include, exclude []string) func(*config) {
		return func(c *config) { c.IncludeNamespaces, c.ExcludeNamespaces = include, exclude }
	}
	shop := []string{"shop"}
	sourceSelector := func(c *config) { c.SourceSelector = []string{"env:prod"} }

	runCases(t, map[string]reconcileCase{
		"a namespace outside the selector is left alone, until it becomes selected": newCase(objectList{namespace(), cm1(), autoWeb(web, state1)}, func(f *fixture) { f.put(time.Minute, cm2()); f.expectWriteCount(0); f.Put(labelled(namespace())) },
			rollPatches).withConfig(selector("env=prod")),
		"Secrets of Helm releases do not count": newCase(objectList{helmSecret("1"), autoWeb(pod(readsSecret("db")), stateOf(dbKey, ""))}, func(f *fixture) { f.Put(helmSecret("2")) },
			nil),
		"only the namespaces of the flag are worked in":           {configure: workedIn([]string{"other"}, nil), change: changeCM},
		"a namespace that is included and excluded is left alone": {configure: workedIn(shop, shop), change: changeCM},
		"including namespaces switches the selector off": newCase(objectList{namespace(), cm1(), autoWeb(web, state1)}, changeCM,
			rollPatches).withConfig(func(c *config) { c.IncludeNamespaces, c.NamespaceSelector = shop, []string{"env=prod"} }),
		"a source that loses its label looks deleted": newCase(objectList{labelled(cm1()), autoWeb(marked(hash1), state1)}, func(f *fixture) { f.Put(cm1()) },
			[]string{envPatch(stateAbsent, "web/"+cmVar, "")}).withConfig(func(c *config) { sourceSelector(c); onDelete(c) }),
		"a dry run writes nothing, and has one Event for each change": newCase(objectList{cm1(), deploy(web, kAuto, "true", kPause, "5m", nativeState, state1), paused}, func(f *fixture) {
			f.put(time.Minute, cm2()).expectEvents(would)
			f.touchWeb() // it is decided on again, with nothing new
			f.advance(time.Minute)
			f.put(time.Minute, cm1()).expectMetric(2, "reloads_total", "result", "dry_run")
		}, nil, would).withConfig(func(c *config) { c.DryRun = true }),
		"a source of another namespace is none of this one's business": newCase(nil, func(f *fixture) { other := cm2(); other.Namespace = "depot"; f.Put(other) }, nil),
	})
}

func helmSecret(version string) runtime.Object {
	s := db("x")
	s.Type, s.Data = "helm.sh/release.v1", map[string][]byte{"release": []byte(version)}
	return s
}
