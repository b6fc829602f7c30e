// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/utils/ptr"
)

var rollouts = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "rollouts"}

func TestNeedsThatCannotBeMet(t *testing.T) {
	widgets := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	cases := map[string]struct {
		needs []Need
		want  string
	}{
		"no controller":              {[]Need{{Resource: Secrets}}, "without a controller"},
		"no resource":                {[]Need{{For: "a"}}, "without resource"},
		"typed Secrets":              {[]Need{{For: "a", Resource: Secrets, Form: Typed}}, "reduced form only"},
		"typed ConfigMaps":           {[]Need{{For: "a", Resource: ConfigMaps, Form: Typed}}, "reduced form only"},
		"digest of a workload":       {[]Need{{For: "a", Resource: Deployments, Digest: digestSHA1}}, "have a digest"},
		"Secret types of ConfigMaps": {[]Need{{For: "a", Resource: ConfigMaps, SecretTypes: ExcludedSecretTypes}}, "Secret types"},
		"last-applied":               {[]Need{{For: "a", Resource: Secrets, Annotations: []string{corev1.LastAppliedConfigAnnotation}}}, "never cached"},
		"template in reduced form":   {[]Need{{For: "a", Resource: Deployments, Template: &Template{}}}, "have a template"},
		"a template's digest without an annotation": {[]Need{{For: "a", Resource: Deployments, Form: Typed,
			Template: &Template{Digest: func(apiruntime.Object) []byte { return nil }}}}, "needs an annotation"},
		"template of a Namespace":           {[]Need{{For: "a", Resource: Namespaces, Form: Typed, Template: &Template{}}}, "have a template"},
		"typed form without a version":      {[]Need{{For: "a", Resource: schema.GroupVersionResource{Resource: "pods"}, Form: Typed}}, "without a version"},
		"unstructured without a version":    {[]Need{{For: "a", Resource: widgets.GroupResource().WithVersion(""), Form: Unstructured}}, "without a version"},
		"unstructured built-in types":       {[]Need{{For: "a", Resource: Deployments, Form: Unstructured}}, "built-in"},
		"unstructured Secrets":              {[]Need{{For: "a", Resource: Secrets, Form: Unstructured}}, "reduced form only"},
		"unstructured without a client":     {[]Need{{For: "a", Resource: widgets, Form: Unstructured}}, "unstructured form"},
		"the same controller twice":         {[]Need{{For: "a", Resource: Secrets}, {For: "a", Resource: Secrets}}, "twice"},
		"two versions of one resource":      {[]Need{{For: "a", Resource: widgets}, {For: "b", Resource: widgets.GroupResource().WithVersion("v2")}}, "needs version v2"},
		"the typed form of an unknown type": {[]Need{{For: "a", Resource: widgets, Form: Typed}}, "typed form"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			plans, err := newPlans(tc.needs)
			if err == nil {
				_, err = newSource(plans[0], Clients{})
			}
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
		})
	}
}

func TestThePlanIsTheUnionOfAllNeeds(t *testing.T) {
	type union struct {
		Form, Selector string
		Optional       bool
		For            []string
	}
	all := "type!=helm.sh/release.v1,type!=kubernetes.io/service-account-token"
	typed := Need{For: "b", Resource: Deployments, Form: Typed}
	trimmed := Need{For: "c", Resource: Deployments, Form: Typed, Template: &Template{}}
	cases := map[string]struct {
		needs []Need
		want  union
	}{
		"metadata suffices": {[]Need{{For: "a", Resource: Secrets}}, union{"metadata", all, false, []string{"a"}}},
		"one digest needs the content": {[]Need{{For: "a", Resource: Secrets}, reloadNeed},
			union{"content digest", all, false, []string{"a", "reload"}}},
		"a declared Secret type is not left out": {[]Need{reloadNeed, {For: "b", Resource: Secrets, SecretTypes: []corev1.SecretType{"helm.sh/release.v1"}}},
			union{"content digest", "type!=kubernetes.io/service-account-token", false, []string{"reload", "b"}}},
		"both declared Secret types are not left out": {[]Need{{For: "b", Resource: Secrets, SecretTypes: ExcludedSecretTypes}},
			union{"metadata", "", false, []string{"b"}}},
		"a template suffices for all": {[]Need{{For: "a", Resource: Deployments}, trimmed},
			union{"typed, trimmed", "", false, []string{"a", "c"}}},
		"one controller needs the whole object": {[]Need{trimmed, typed}, union{"typed", "", false, []string{"c", "b"}}},
		"a template of a custom resource": {[]Need{{For: "a", Resource: rollouts}, {For: "b", Resource: rollouts, Form: Unstructured, Template: &Template{}}},
			union{"unstructured, trimmed", "", false, []string{"a", "b"}}},
		"the whole of a custom resource": {[]Need{{For: "a", Resource: rollouts, Form: Unstructured}}, union{"unstructured", "", false, []string{"a"}}},
		"optional for all": {[]Need{{For: "a", Resource: Jobs, Optional: true}, {For: "b", Resource: Jobs, Optional: true}},
			union{"metadata", "", true, []string{"a", "b"}}},
		"optional for one, required by another": {[]Need{{For: "a", Resource: Jobs, Optional: true}, {For: "b", Resource: Jobs}},
			union{"metadata", "", false, []string{"a", "b"}}},
		"any version and a certain one": {[]Need{{For: "a", Resource: Jobs.GroupResource().WithVersion("")}, {For: "b", Resource: Jobs}},
			union{"metadata", "", false, []string{"a", "b"}}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := mustPlan(t, tc.needs...)
			got := union{p.form(), p.fieldSelector, p.optional, p.controllers()}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("plan (-want +got):\n%s", diff)
			}
		})
	}
}

func TestConfig(t *testing.T) {
	cfg := NewConfig()
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	cfg.AddFlags(fs)
	if err := cfg.Validate(); err != nil || cfg.Standby != StandbyWarm || cfg.CacheMutationDetection || cfg.MinResyncPeriod != 12*time.Hour {
		t.Errorf("defaults %+v: %v", cfg, err)
	}
	if err := fs.Parse([]string{"--standby=cold", "--cache-mutation-detection", "--min-resync-period=0"}); err != nil {
		t.Fatal(err)
	}
	if err := cfg.Validate(); err != nil || cfg.Standby != StandbyCold || !cfg.CacheMutationDetection || cfg.MinResyncPeriod != 0 {
		t.Errorf("parsed %+v: %v", cfg, err)
	}
	cfg.Standby, cfg.MinResyncPeriod = "lukewarm", -1
	for _, flag := range []string{"--standby", "--min-resync-period"} {
		if err := cfg.Validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("error %v does not name %s", err, flag)
		}
	}
}

// fullTemplate has everything that can be trimmed and everything that cannot.
func fullTemplate() corev1.PodTemplateSpec {
	container := corev1.Container{
		Name: "web", Image: "web:1", Args: []string{"--x"},
		Env: []corev1.EnvVar{
			{Name: "PLAIN", Value: "1"},
			{Name: "MARK_DB", Value: "hash"},
			{Name: "FIELD", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.name"}}},
			{Name: "CM", ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{Key: "k"}}},
			{Name: "SECRET", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{Key: "k"}}},
		},
		EnvFrom:      []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{}}},
		VolumeMounts: []corev1.VolumeMount{{Name: "cm", MountPath: "/etc/cm"}},
		Resources:    corev1.ResourceRequirements{Limits: corev1.ResourceList{}},
	}
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Labels: map[string]string{"l": "1"}, Annotations: map[string]string{"auto": "true", "other": "x"}},
		Spec: corev1.PodSpec{
			ServiceAccountName: "sa", Containers: []corev1.Container{container}, InitContainers: []corev1.Container{{Name: "init", Image: "i"}},
			Volumes: []corev1.Volume{
				{Name: "cm", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
					LocalObjectReference: corev1.LocalObjectReference{Name: "config"}, Items: []corev1.KeyToPath{{Key: "k"}}}}},
				{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "db", DefaultMode: ptr.To[int32](420)}}},
				{Name: "both", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
					{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}},
					{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "p"}}},
					{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "q"}}},
				}}}},
				{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
					{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "t"}}}}}},
				{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			},
		},
	}
}

func trimmedTemplate() corev1.PodTemplateSpec {
	full := fullTemplate().Spec.Containers[0]
	return corev1.PodTemplateSpec{
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{"auto": "true"}},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "init"}},
			Containers: []corev1.Container{{Name: "web", Env: []corev1.EnvVar{full.Env[1], full.Env[3], full.Env[4]},
				EnvFrom: full.EnvFrom, VolumeMounts: []corev1.VolumeMount{{Name: "cm"}}}},
			Volumes: []corev1.Volume{
				{Name: "cm", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}},
				{Name: "secret", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "db"}}},
				{Name: "both", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
					{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "p"}}},
					{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "q"}}},
				}}}},
			},
		},
	}
}

func TestWorkloadsKeepOnlyWhatTheIndexOfReferencesNeeds(t *testing.T) {
	full := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: "7", Generation: 3,
		CreationTimestamp: metav1.Unix(1, 0), Labels: map[string]string{"l": "1"},
		Annotations:     map[string]string{"auto": "true", "other": "x", corev1.LastAppliedConfigAnnotation: "{}"},
		OwnerReferences: []metav1.OwnerReference{{Name: "o"}}, ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m"}}}
	trimmed := metav1.ObjectMeta{Namespace: "shop", Name: "web", UID: "u", ResourceVersion: "7", Generation: 3,
		Annotations: map[string]string{"auto": "true"}, OwnerReferences: []metav1.OwnerReference{{Name: "o"}}}
	fullJob := batchv1.JobSpec{Suspend: ptr.To(true), ManualSelector: ptr.To(true), Parallelism: ptr.To[int32](2), Template: fullTemplate()}
	trimmedJob := batchv1.JobSpec{Suspend: ptr.To(true), ManualSelector: ptr.To(true), Template: trimmedTemplate()}
	cases := map[string]struct {
		resource schema.GroupVersionResource
		in, want apiruntime.Object
	}{
		"Deployment": {Deployments,
			&appsv1.Deployment{ObjectMeta: full, Spec: appsv1.DeploymentSpec{Paused: true, Replicas: ptr.To[int32](3), Template: fullTemplate()}, Status: appsv1.DeploymentStatus{Replicas: 3}},
			&appsv1.Deployment{ObjectMeta: trimmed, Spec: appsv1.DeploymentSpec{Paused: true, Template: trimmedTemplate()}}},
		"StatefulSet": {StatefulSets,
			&appsv1.StatefulSet{ObjectMeta: full, Spec: appsv1.StatefulSetSpec{ServiceName: "s", Template: fullTemplate()}},
			&appsv1.StatefulSet{ObjectMeta: trimmed, Spec: appsv1.StatefulSetSpec{Template: trimmedTemplate()}}},
		"DaemonSet": {DaemonSets,
			&appsv1.DaemonSet{ObjectMeta: full, Spec: appsv1.DaemonSetSpec{MinReadySeconds: 1, Template: fullTemplate()}},
			&appsv1.DaemonSet{ObjectMeta: trimmed, Spec: appsv1.DaemonSetSpec{Template: trimmedTemplate()}}},
		"Job": {Jobs, &batchv1.Job{ObjectMeta: full, Spec: fullJob}, &batchv1.Job{ObjectMeta: trimmed, Spec: trimmedJob}},
		"CronJob": {CronJobs,
			&batchv1.CronJob{ObjectMeta: full, Spec: batchv1.CronJobSpec{Schedule: "* * * * *", Suspend: ptr.To(true), ConcurrencyPolicy: batchv1.ForbidConcurrent,
				JobTemplate: batchv1.JobTemplateSpec{ObjectMeta: full, Spec: fullJob}}, Status: batchv1.CronJobStatus{Active: []corev1.ObjectReference{{Name: "j"}}}},
			&batchv1.CronJob{ObjectMeta: trimmed, Spec: batchv1.CronJobSpec{Suspend: ptr.To(true), ConcurrencyPolicy: batchv1.ForbidConcurrent,
				JobTemplate: batchv1.JobTemplateSpec{Spec: trimmedJob}}, Status: batchv1.CronJobStatus{Active: []corev1.ObjectReference{{Name: "j"}}}}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := mustPlan(t, Need{For: "reload", Resource: tc.resource, Form: Typed, Annotations: []string{"auto"},
				Template: &Template{Annotations: []string{"auto"}, EnvPrefixes: []string{"MARK_"}}})
			got, err := p.reduce(tc.in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("trimmed (-want +got):\n%s", diff)
			}
		})
	}
}

func TestADigestOfTheWholeWorkloadIsKept(t *testing.T) {
	imageOf := func(o apiruntime.Object) []byte {
		if d, ok := o.(*appsv1.Deployment); ok && len(d.Spec.Template.Spec.Containers) > 0 {
			return []byte(d.Spec.Template.Spec.Containers[0].Image)
		}
		return nil
	}
	p := mustPlan(t, Need{For: "a", Resource: Deployments, Form: Typed, Template: &Template{Digest: imageOf, DigestAnnotation: "digest"}})
	for image, want := range map[string]map[string]string{"web": {"digest": "776562"}, "": nil} {
		d := &appsv1.Deployment{}
		if image != "" {
			d.Spec.Template.Spec.Containers = []corev1.Container{{Image: image}}
		}
		got, err := p.reduce(d)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got.(*appsv1.Deployment).Annotations); diff != "" {
			t.Errorf("annotations of %q (-want +got):\n%s", image, diff)
		}
	}
}

func TestACustomResourceWithATemplateIsTrimmed(t *testing.T) {
	toObject := func(template corev1.PodTemplateSpec) map[string]any {
		object, err := apiruntime.DefaultUnstructuredConverter.ToUnstructured(&template)
		if err != nil {
			t.Fatal(err)
		}
		return object
	}
	rollout := func(annotations map[string]any, spec map[string]any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Rollout", "spec": spec,
			"metadata": map[string]any{"namespace": "shop", "name": "web", "uid": "u", "resourceVersion": "7", "generation": int64(3), "annotations": annotations}}}
	}
	full, trimmed := map[string]any{"auto": "true", "other": "x"}, map[string]any{"auto": "true"}
	ref := map[string]any{"kind": "Deployment", "name": "web"}
	broken := map[string]any{"spec": "none"}
	cases := map[string]struct{ in, want map[string]any }{
		"its template":               {map[string]any{"replicas": int64(2), "template": toObject(fullTemplate())}, map[string]any{"template": toObject(trimmedTemplate())}},
		"a reference instead of one": {map[string]any{"replicas": int64(2), "workloadRef": ref}, map[string]any{"workloadRef": ref}},
		"one that does not parse":    {map[string]any{"template": broken}, map[string]any{"template": broken}},
		"one that is no object":      {map[string]any{"template": "none"}, map[string]any{"template": "none"}},
		"nothing":                    {nil, map[string]any{}},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := mustPlan(t, Need{For: "reload", Resource: rollouts, Form: Unstructured, Annotations: []string{"auto"},
				Template: &Template{Annotations: []string{"auto"}, EnvPrefixes: []string{"MARK_"}}})
			in := rollout(full, tc.in)
			in.Object["status"] = map[string]any{"replicas": int64(2)}
			got, err := p.reduce(in)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(rollout(trimmed, tc.want), got); diff != "" {
				t.Errorf("trimmed (-want +got):\n%s", diff)
			}
			if size := sizeOf(got); size < 200 || size > 5000 {
				t.Errorf("size %d", size)
			}
		})
	}
}

func TestAWholeTypedObjectLosesManagedFieldsAndLastApplied(t *testing.T) {
	p := mustPlan(t, Need{For: "a", Resource: Namespaces, Form: Typed})
	got, err := p.reduce(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", ManagedFields: []metav1.ManagedFieldsEntry{{}},
		Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "k": "v"}}})
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{"k": "v"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("object (-want +got):\n%s", diff)
	}
}
