// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/sha1"
	"encoding/hex"
	"maps"
	"regexp/syntax"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp/cmpopts"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

const (
	kCM        = "configmap.reloader.stakater.com/reload"
	kCMExclude = "configmaps.exclude.reloader.stakater.com/reload"
)

func cm(data ...string) *corev1.ConfigMap {
	c := &corev1.ConfigMap{Data: map[string]string{}}
	for i := 0; i < len(data); i += 2 {
		c.Data[data[i]] = data[i+1]
	}
	return c
}

func TestDigestFollowsTheData(t *testing.T) {
	color := func() *corev1.ConfigMap { return cm("color", "blue", "size", "10") }
	withLogo, labelled := color(), color()
	withLogo.BinaryData = map[string][]byte{"logo": {0, 1, 2}}
	labelled.Labels, labelled.Annotations = map[string]string{"a": "b"}, map[string]string{"c": "d"}
	typed := &corev1.Secret{Data: map[string][]byte{"user": []byte("admin"), "password": []byte("s3cr3t")}, Type: corev1.SecretTypeBasicAuth, Immutable: new(bool)}
	podStatus := func(class string, objects ...any) runtime.Object {
		return &unstructured.Unstructured{Object: map[string]any{"status": map[string]any{"secretProviderClassName": class, "objects": objects}}}
	}
	object := func(id, version string) any { return map[string]any{"id": id, "version": version} }
	sum := sha1.Sum([]byte("SecretProviderClassName=vault;secret/a=1;secret/b=2"))
	for name, tc := range map[string]struct {
		obj  runtime.Object
		want string
	}{
		"binary data is base64":                             {withLogo, "4ca47105f0885b645d203c1429e8e67240089548"},
		"entries are sorted as whole strings":               {cm("a", "1", "a-b", "2", "a_b", "3"), "6d9fa262396e8ec8a6a340d703d02f93fef57e6a"},
		"a Secret's bytes are raw":                          {&corev1.Secret{Data: map[string][]byte{"raw": {0xff, 0}}}, "3f545a5f4ba0fe837544ce9e2d258c6131fbfc19"},
		"no data at all":                                    {cm(), "da39a3ee5e6b4b0d3255bfef95601890afd80709"},
		"a ConfigMap's labels and annotations do not count": {labelled, "fc284a838ce31ea4fb2467fe13c7ac02add6ef3c"},
		"a Secret's type and immutable do not":              {typed, "e013dcfd8b3a9e80e812740978788202e1ef1325"},
		"what a pod has mounted of a class":                 {podStatus("vault", object("secret/b", "2"), object("secret/a", "1")), hex.EncodeToString(sum[:]) + "vault"},
		"a pod that has mounted nothing yet":                {podStatus("vault"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			hash, class := ParseDigest(DigestSource(tc.obj, labels.Everything()))
			if got := hash + class; got != tc.want {
				t.Errorf("digest = %s, want %s", got, tc.want)
			}
		})
	}
	if sum := sha1.Sum([]byte("__RELOADER_EMPTY_DELETE_MARKER__")); hex.EncodeToString(sum[:]) != deletedHash {
		t.Errorf("hash of a deletion = %x, want %s", sum, deletedHash)
	}
}

func TestVariableNamesItsSource(t *testing.T) {
	for key, want := range map[SourceKey]string{
		{ConfigMap, "a--b.c"}: "STAKATER_A_B_C_CONFIGMAP",
		{Secret, "1-x"}:       "STAKATER_1_X_SECRET",
		{Secret, ".x"}:        "STAKATER_X_SECRET",
	} {
		if got := variableName(key); got != want {
			t.Errorf("variable of %s = %s, want %s", key, got, want)
		}
	}
}

func compatKeys() *AnnotationKeys { return NewAnnotationKeys(&Options{Compat: true}, SourceTypes) }

// Whoever may annotate a workload must not be able to exhaust the manager.
func TestParseCostIsBounded(t *testing.T) {
	k := compatKeys()
	for name, list := range map[string]struct{ key, item string }{
		"repetitions":                    {kCM, "x{1000}"},
		"repetitions of repetitions":     {kCM, "((x*y?){30}){30}"},
		"classes":                        {kCM, `\pL\pN\PL[^\pL]`},
		"one long item of classes":       {kCM, strings.Repeat(`\pL`, 3000)},
		"wildcards":                      {kCM, ".*"},
		"what takes long not to compile": {kCM, strings.Repeat(`\pL`, 300) + "["},
		"native wildcards":               {nativeReload, "configmap/a*b*c"},
		"native wildcards of exclusions": {nativeReload, "!configmap/a*b*c"},
	} {
		t.Run(name, func(t *testing.T) {
			value := strings.Repeat(list.item+",", maxList/(len(list.item)+1))
			var before, after goruntime.MemStats
			goruntime.ReadMemStats(&before)
			selection := k.parseSelection(map[string]string{list.key: value}, nil)
			goruntime.ReadMemStats(&after)
			if got := (after.TotalAlloc - before.TotalAlloc) >> 20; got > 64 {
				t.Errorf("%d MiB allocated", got)
			}
			if re := selection.types[ConfigMap].named.re; re != nil {
				parsed, _ := syntax.Parse(re.String(), syntax.Perl) // as regexp did
				program, err := syntax.Compile(parsed.Simplify())
				if err != nil || len(program.Inst) > 2*maxSteps+maxList {
					t.Errorf("expressions of %d steps, %v", len(program.Inst), err)
				}
			}
			for _, p := range selection.Problems {
				if len(p.String()) > 600 {
					t.Errorf("problem of %d bytes", len(p.String()))
				}
			}
		})
	}
}

func TestParseRefusesWhatDoesNotFit(t *testing.T) {
	k := compatKeys()
	long := func(item string) string { return strings.Repeat(item+",", maxList/len(item)) }
	for name, tc := range map[string]struct {
		meta map[string]string
		want Match
		bad  int
	}{
		"a dot of a name stands for any character":           {map[string]string{kCM: "app.config"}, Named, 0},
		"a dot stands for one character":                     {map[string]string{kCM: "app..config,ap.config"}, No, 0},
		"any text in the middle and at the end":              {map[string]string{kCM: "a.*-co.*"}, Named, 0},
		"any text at the start, and a character":             {map[string]string{kCM: ".*.onfig"}, Named, 0},
		"any text in a part of the name":                     {map[string]string{kCM: "app-.*con,pp-.*,.*-"}, No, 0},
		"what repeats another character than a dot":          {map[string]string{kCM: "app-*,app*config"}, No, 0},
		"an expression that repeats too often, others count": {map[string]string{kCM: "(xyxyxyxyxyxy){900},app-.*"}, Named, 1},
		"two expressions with groups of one name":            {map[string]string{kCM: "(?P<x>db),(?P<x>app)-.*"}, Named, 0},
		"an expression that quotes leaves the next alone":    {map[string]string{kCM: `x\Q,app-.*`}, Named, 0},
		"a list that is too long":                            {map[string]string{kCM: "app-config," + long("x")}, No, 1},
		"exclusions that are too long exclude everything":    {map[string]string{kCM: "app-config", kCMExclude: long("x")}, No, 1},
		"a native list that is too long":                     {map[string]string{nativeReload: "auto," + long("configmap/x")}, No, 1},
		"a native expression is no name, others count":       {map[string]string{nativeReload: "configmap/.*,configmap/app-config"}, Named, 1},
		"off contradicts auto":                               {map[string]string{nativeReload: "off,auto"}, No, 1},
		"auto contradicts off":                               {map[string]string{nativeReload: "configmap/app-*,off"}, No, 1},
		"off alone does not":                                 {map[string]string{nativeReload: "off,"}, No, 0},
	} {
		t.Run(name, func(t *testing.T) {
			selection := k.parseSelection(tc.meta, nil)
			if got := selection.match(SourceKey{ConfigMap, "app-config"}, Source{}); got != tc.want {
				t.Errorf("match = %v, want %v", got, tc.want)
			}
			if len(selection.Problems) != tc.bad {
				t.Errorf("problems %.500s, want %d", selection.Problems, tc.bad)
			}
		})
	}
}

// An index is asked where the events of all workloads wait, so no expression is parsed for it.
func TestOutlineParsesNoExpressions(t *testing.T) {
	k := compatKeys()
	for name, tc := range map[string]struct {
		list     string
		patterns bool
		names    int
	}{
		"expressions":      {strings.Repeat("(x*y?){30},", 100), true, 0},
		"names":            {"a,b,c", false, 3},
		"some of each":     {"a,b.*", true, 1},
		"a name with dots": {"a.b", true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			selection := k.Outline(&Workload{Kind: &Kind{Name: "Deployment"}, Annotations: map[string]string{kCM: tc.list}})
			names := 0
			for range selection.Names {
				names++
			}
			if selection.NamesByPattern(ConfigMap) != tc.patterns || names != tc.names || selection.types[ConfigMap].named.re != nil || len(selection.Problems) > 0 {
				t.Errorf("%+v", selection)
			}
		})
	}
}

func TestStateOfAnotherFormIsRefused(t *testing.T) {
	for _, text := range []string{`[]`, `{"pod/x":""}`, `{"secret/x":"zzzzzzzzzzzzzzzz"}`} {
		if s, err := ParseState(text, QueueKey{}); err == nil {
			t.Errorf("%s is the state %v", text, s)
		}
	}
}

const kAuto = "reloader.stakater.com/auto"

// cached is a workload as the cache keeps it.
type cached struct {
	*metav1.ObjectMeta
	digest []byte
}

func (c cached) Digest(string) []byte { return c.digest }
func (cached) FirstVersion() string   { return "" }
func (cached) CreatedVersion() string { return "" }
func (cached) ChangedVersion() string { return "" }

// reduce returns a workload as the cache keeps it.
func reduce(k *AnnotationKeys, obj runtime.Object) cached {
	m := obj.(metav1.Object)
	annotations := maps.Clone(m.GetAnnotations())
	maps.DeleteFunc(annotations, func(key, _ string) bool { return !slices.Contains(k.WorkloadKeys(), key) })
	return cached{&metav1.ObjectMeta{Namespace: m.GetNamespace(), Name: m.GetName(), UID: m.GetUID(),
		ResourceVersion: m.GetResourceVersion(), Annotations: annotations}, k.DigestWorkload(obj)}
}

// references returns a template that refers to sources in every possible way, and to other things.
func references() corev1.PodTemplateSpec {
	named := func(name string) corev1.LocalObjectReference { return corev1.LocalObjectReference{Name: name} }
	fromSecret := func(name string) *corev1.EnvVarSource {
		return &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: named(name), Key: "k"}}
	}
	t := corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{kAuto: "true", nativeMark: "mark", "example.com/other": "x"}}}
	t.Spec.Containers = []corev1.Container{{
		Name: "web",
		Env: []corev1.EnvVar{{Name: "PASSWORD", ValueFrom: fromSecret("db")}, {Name: "STAKATER_APP_CONFIG_CONFIGMAP", Value: "1"},
			{Name: "PLAIN", Value: "x"}},
		EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: named("app-config")}},
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: named("s")}}},
		VolumeMounts: []corev1.VolumeMount{{Name: "cm"}, {Name: "tmp"}, {Name: "both"}},
	}}
	t.Spec.ImagePullSecrets = []corev1.LocalObjectReference{named("registry")}
	t.Spec.InitContainers = []corev1.Container{{Name: "init", VolumeMounts: []corev1.VolumeMount{{Name: "secret"}}, Env: []corev1.EnvVar{
		{Name: "C", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: named("c"), Key: "k"}}},
		{Name: "N", ValueFrom: fromSecret("")},
		{Name: "F", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}}}}}
	t.Spec.Volumes = []corev1.Volume{
		{Name: "cm", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: named("files")}}},
		{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "certs"}}},
		{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "both", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}},
			{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: named("p")}},
			{Secret: &corev1.SecretProjection{LocalObjectReference: named("q")}},
		}}}},
	}
	return t
}

// rollout returns an Argo Rollout with this spec.
func rollout(spec map[string]any) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "argoproj.io/v1alpha1", "kind": "Rollout", "spec": spec,
		"metadata": map[string]any{"namespace": "shop", "name": "web", "uid": "u", "annotations": map[string]any{kAuto: "true"}}}}
}

func TestWorkloadCachedReadsAsLive(t *testing.T) {
	meta := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: "7", Annotations: map[string]string{kAuto: "true"}}
	owned := meta
	owned.OwnerReferences = []metav1.OwnerReference{{Kind: "Widget"}, {Kind: "CronJob", UID: "c", Controller: ptr.To(true)}}
	full := func() Content {
		return Content{
			TemplateAnnotations: map[string]string{kAuto: "true", nativeMark: "mark"},
			Inits:               []Container{{Name: "init", Mounts: []string{"secret"}, Env: []SourceKey{{ConfigMap, "c"}, {Secret, ""}}}},
			Containers: []Container{{Name: "web", Mounts: []string{"cm", "both"}, Vars: []string{"STAKATER_APP_CONFIG_CONFIGMAP"},
				Env: []SourceKey{{Secret, "db"}, {ConfigMap, "app-config"}, {Secret, "s"}}}},
			Volumes: map[string][]SourceKey{"cm": {{ConfigMap, "files"}}, "secret": {{Secret, "certs"}}, "both": {{ConfigMap, "p"}, {Secret, "q"}}},
		}
	}
	contentWith := func(change func(*Content)) Content {
		c := full()
		change(&c)
		return c
	}
	template := references()
	object, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&template)
	assert.NoError(t, err)
	k := compatKeys()
	for name, tc := range map[string]struct {
		obj  runtime.Object
		want Content
	}{
		"paused Deployment": {&appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Paused: true, Template: references()}},
			contentWith(func(c *Content) { c.Paused = true })},
		"StatefulSet": {&appsv1.StatefulSet{ObjectMeta: meta, Spec: appsv1.StatefulSetSpec{Template: references()}}, full()},
		"DaemonSet":   {&appsv1.DaemonSet{ObjectMeta: meta, Spec: appsv1.DaemonSetSpec{Template: references()}}, full()},
		"a suspended CronJob that forbids two Jobs at once": {&batchv1.CronJob{ObjectMeta: meta, Spec: batchv1.CronJobSpec{
			Suspend: ptr.To(true), ConcurrencyPolicy: batchv1.ForbidConcurrent,
			JobTemplate: batchv1.JobTemplateSpec{ObjectMeta: meta, Spec: batchv1.JobSpec{Template: references()}}}},
			contentWith(func(c *Content) { c.Suspended, c.ForbidsConcurrent = true, true })},
		"Job of a CronJob": {&batchv1.Job{ObjectMeta: owned, Spec: batchv1.JobSpec{Template: references()}},
			contentWith(func(c *Content) { c.CronJob, c.RolledElsewhere = "c", true })},
		"Rollout that refers to another workload": {rollout(map[string]any{"template": object, "workloadRef": map[string]any{"kind": "Deployment", "name": "x"}}),
			contentWith(func(c *Content) { c.RolledElsewhere = true })},
		"Rollout whose template is null": {rollout(map[string]any{"template": nil}), Content{}},
	} {
		t.Run(name, func(t *testing.T) {
			before := tc.obj.DeepCopyObject()
			cached, err := NewWorkload(&Kind{Name: "Kind"}, reduce(k, tc.obj), "config-reload")
			assert.NoError(t, err)
			assert.Equal(t, "object, which shall not change", before, tc.obj)
			cached.AnnotationSum = 0 // which only the cache has
			assert.Equal(t, "cached", tc.want, cached.Content)
			live, err := NewWorkload(&Kind{Name: "Kind"}, tc.obj.(metav1.Object), "config-reload")
			assert.NoError(t, err)
			delete(live.TemplateAnnotations, "example.com/other") // the only other difference
			assert.Equal(t, "Workload of the cached object", live, cached, cmpopts.IgnoreUnexported(Workload{}), cmpopts.IgnoreFields(Workload{}, "ContentVersion"))
		})
	}
}

func TestUnreadableWorkloadIsAnErrorThatNamesIt(t *testing.T) {
	for name, obj := range map[string]runtime.Object{
		"a template of another form":       rollout(map[string]any{"template": map[string]any{"spec": "none"}}),
		"a template that is no object":     rollout(map[string]any{"template": "none"}),
		"an object that is not a workload": &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, live := NewWorkload(&Kind{Name: "Rollout"}, obj.(metav1.Object), "config-reload")
			_, cached := NewWorkload(&Kind{Name: "Rollout"}, reduce(compatKeys(), obj), "config-reload")
			if live == nil || cached == nil || live.Error() != cached.Error() || !strings.Contains(live.Error(), "Rollout/shop/web: ") {
				t.Errorf("live %v, cached %v", live, cached)
			}
		})
	}
}

// Annotations may be as large as the API server takes.
func TestHugeAnnotationIsRefusedAndNotKept(t *testing.T) {
	k := compatKeys()
	for name, annotation := range map[string][2]string{
		"a list of 256 KiB":       {kCM, strings.Repeat("app-.*,", 256<<10/7)},
		"a native list":           {nativeReload, strings.Repeat("configmap/a*b,", 256<<10/14)},
		"a delay that is no such": {nativeDelay, strings.Repeat("1", 256<<10)},
	} {
		t.Run(name, func(t *testing.T) {
			meta := metav1.ObjectMeta{Annotations: map[string]string{annotation[0]: annotation[1]}}
			d := &appsv1.Deployment{ObjectMeta: meta, Spec: appsv1.DeploymentSpec{Template: corev1.PodTemplateSpec{ObjectMeta: meta}}}
			if size := len(k.DigestWorkload(d)); size > 16<<10 {
				t.Errorf("the cache keeps %d bytes of the template", size)
			}
			workload, err := NewWorkload(&Kind{Name: "Deployment"}, d, "config-reload")
			assert.NoError(t, err)
			selection := k.Selection(workload)
			if len(selection.Problems) != 1 || !strings.HasPrefix(selection.Problems[0].String(), annotation[0]+": ") || len(selection.Problems[0].String()) > 600 {
				t.Errorf("problems %v, want one that names the annotation", selection.Problems)
			}
			if steps := selection.Steps(SourceKey{Name: strings.Repeat("a", 253)}); steps > 1000 {
				t.Errorf("a name takes %d steps", steps)
			}
		})
	}
}
