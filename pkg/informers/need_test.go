// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"
)

var rollouts = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "rollouts"}

func TestNeedsThatCannotBeMet(t *testing.T) {
	widgets := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}
	clients := clientsOf(t, &rest.Config{})
	cases := map[string]struct {
		needs []Need
		want  string
	}{
		"no controller":                     {[]Need{{Resource: Secrets}}, "without a controller"},
		"no resource":                       {[]Need{{For: "a"}}, "without resource"},
		"typed Secrets":                     {[]Need{{For: "a", Resource: Secrets, Form: Typed}}, "reduced form only"},
		"typed ConfigMaps":                  {[]Need{{For: "a", Resource: ConfigMaps, Form: Typed}}, "reduced form only"},
		"digest in typed form":              {[]Need{{For: "a", Resource: Deployments, Form: Typed, Digest: digestSHA1}}, "reduced form has a digest"},
		"Secret types of ConfigMaps":        {[]Need{{For: "a", Resource: ConfigMaps, SecretTypes: ExcludedSecretTypes}}, "Secret types"},
		"last-applied":                      {[]Need{{For: "a", Resource: Secrets, Annotations: []string{corev1.LastAppliedConfigAnnotation}}}, "never cached"},
		"digest without a version":          {[]Need{{For: "a", Resource: widgets.GroupResource().WithVersion(""), Digest: digestSHA1}}, "without a version"},
		"typed form without a version":      {[]Need{{For: "a", Resource: schema.GroupVersionResource{Resource: "pods"}, Form: Typed}}, "without a version"},
		"unstructured without a version":    {[]Need{{For: "a", Resource: widgets.GroupResource().WithVersion(""), Form: Unstructured}}, "without a version"},
		"unstructured built-in types":       {[]Need{{For: "a", Resource: Deployments, Form: Unstructured}}, "cannot be had in unstructured form"},
		"unstructured Secrets":              {[]Need{{For: "a", Resource: Secrets, Form: Unstructured}}, "reduced form only"},
		"the same controller twice":         {[]Need{{For: "a", Resource: Secrets}, {For: "a", Resource: Secrets}}, "twice"},
		"two versions of one resource":      {[]Need{{For: "a", Resource: widgets}, {For: "b", Resource: widgets.GroupResource().WithVersion("v2")}}, "needs version v2"},
		"two forms of one resource":         {[]Need{{For: "a", Resource: Deployments, Form: Typed}, {For: "b", Resource: Deployments, Form: Unstructured}}, "another form"},
		"the typed form of an unknown type": {[]Need{{For: "a", Resource: widgets, Form: Typed}}, "cannot be had in typed form"},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			plans, err := newPlans(tc.needs)
			if err == nil {
				_, err = newSource(plans[0], clients, "")
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
	digested := Need{For: "c", Resource: Deployments, Digest: digestSHA1}
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
		"a digest suffices for all": {[]Need{{For: "a", Resource: Deployments}, digested},
			union{"content digest", "", false, []string{"a", "c"}}},
		"one controller needs the whole object": {[]Need{digested, typed}, union{"typed", "", false, []string{"c", "b"}}},
		"a digest of a custom resource": {[]Need{{For: "a", Resource: rollouts}, {For: "b", Resource: rollouts, Digest: digestSHA1}},
			union{"content digest", "", false, []string{"a", "b"}}},
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

func TestADigestIsAllThatIsKeptOfAnyContent(t *testing.T) {
	replicas := func(o apiruntime.Object) []byte {
		switch o := o.(type) {
		case *appsv1.Deployment:
			return strconv.AppendInt(nil, int64(*o.Spec.Replicas), 10)
		case *unstructured.Unstructured:
			n, _, _ := unstructured.NestedInt64(o.Object, "spec", "replicas")
			return strconv.AppendInt(nil, n, 10)
		}
		return nil
	}
	annotations := map[string]string{"auto": "true", "other": "x"}
	rollout := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{"replicas": int64(3)}}}
	rollout.SetAnnotations(annotations)
	cases := map[string]struct {
		resource schema.GroupVersionResource
		in       apiruntime.Object
	}{
		"of a built-in type":   {Deployments, &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}, Spec: appsv1.DeploymentSpec{Replicas: ptr.To[int32](3)}}},
		"of a custom resource": {rollouts, rollout},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			p := mustPlan(t, Need{For: "a", Resource: tc.resource, Annotations: []string{"auto"}, Digest: replicas})
			got, err := (&reducer{plan: p, panics: newPanics("", clock.RealClock{}, nil)}).reduce(tc.in)
			if err != nil {
				t.Fatal(err)
			}
			e := got.(*Object)
			if string(e.Digest("a")) != "3" || len(e.GetAnnotations()) != 1 || e.GetAnnotations()["auto"] != "true" {
				t.Errorf("digest %q, annotations %v", e.Digest("a"), e.GetAnnotations())
			}
		})
	}
}

func TestAWholeTypedObjectLosesManagedFieldsAndLastApplied(t *testing.T) {
	p := mustPlan(t, Need{For: "a", Resource: Namespaces, Form: Typed})
	got, err := (&reducer{plan: p, panics: newPanics("", clock.RealClock{}, nil)}).reduce(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", ManagedFields: []metav1.ManagedFieldsEntry{{}},
		Annotations: map[string]string{corev1.LastAppliedConfigAnnotation: "{}", "k": "v"}}})
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Annotations: map[string]string{"k": "v"}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("object (-want +got):\n%s", diff)
	}
}

func TestTheSizeOfACustomResourceIsEstimated(t *testing.T) {
	u := &unstructured.Unstructured{Object: map[string]any{"spec": map[string]any{
		"text": strings.Repeat("x", 1000), "list": []any{int64(1), strings.Repeat("y", 500)}}}}
	if size := sizeOf(u); size < 1500 || size > 2500 {
		t.Errorf("size %d", size)
	}
}
