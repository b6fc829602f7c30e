// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

func TestCheckLegacyLocks(t *testing.T) {
	meta := func(holder string, renewed time.Duration) metav1.ObjectMeta {
		record, err := json.Marshal(resourcelock.LeaderElectionRecord{
			HolderIdentity: holder, LeaseDurationSeconds: 15, RenewTime: metav1.NewTime(time.Now().Add(renewed)),
		})
		if err != nil {
			t.Fatal(err)
		}
		return metav1.ObjectMeta{Namespace: "kube-system", Name: "quartermaster",
			Annotations: map[string]string{resourcelock.LeaderElectionRecordAnnotationKey: string(record)}}
	}
	garbled := meta("a", 0)
	garbled.Annotations[resourcelock.LeaderElectionRecordAnnotationKey] = "{"
	tests := map[string]struct {
		objects []runtime.Object
		fail    error
		want    []string // of the errors, in order
	}{
		"nothing there":                       {},
		"an object of that name that is none": {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "quartermaster"}}}},
		"a fresh record in a ConfigMap":       {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: meta("a", -time.Second)}}, want: []string{`"a" leads through the annotation control-plane.alpha.kubernetes.io/leader of the *v1.ConfigMap kube-system/quartermaster`}},
		"a fresh record in Endpoints":         {objects: []runtime.Object{&corev1.Endpoints{ObjectMeta: meta("a", -time.Second)}}, want: []string{"*v1.Endpoints"}},                                                    //nolint:staticcheck // legacy
		"both":                                {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: meta("a", 0)}, &corev1.Endpoints{ObjectMeta: meta("b", 0)}}, want: []string{"*v1.ConfigMap", "*v1.Endpoints"}}, //nolint:staticcheck // legacy
		"from a clock that is ahead":          {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: meta("a", time.Hour)}}, want: []string{"*v1.ConfigMap"}},
		"from a clock that is behind":         {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: meta("a", -25*time.Second)}}, want: []string{"*v1.ConfigMap"}},
		"an old record":                       {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: meta("a", -31*time.Second)}}},
		"a record of nobody":                  {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: meta("", 0)}}},
		"a garbled record":                    {objects: []runtime.Object{&corev1.ConfigMap{ObjectMeta: garbled}}, want: []string{"annotation"}},
		"no permission":                       {fail: apierrors.NewForbidden(schema.GroupResource{Resource: "x"}, "quartermaster", errors.New("no"))},
		"no answer":                           {fail: errors.New("network is down"), want: []string{"check configmaps", "check endpoints"}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			client := fake.NewSimpleClientset(test.objects...)
			if test.fail != nil {
				client.PrependReactor("get", "*", func(clienttesting.Action) (bool, runtime.Object, error) { return true, nil, test.fail })
			}
			err := CheckLegacyLocks(t.Context(), NewConfig(types.NamespacedName{Namespace: "kube-system", Name: "quartermaster"}), client.CoreV1().ConfigMaps("kube-system"), client.CoreV1().Endpoints("kube-system"))
			var got []string
			if err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			if len(got) != len(test.want) {
				t.Fatalf("got %q, want %q", got, test.want)
			}
			for i := range got {
				if !strings.Contains(got[i], test.want[i]) {
					t.Errorf("got %s\nwant ...%s...", got[i], test.want[i])
				}
			}
		})
	}
	off := NewConfig(types.NamespacedName{Namespace: "kube-system", Name: "quartermaster"})
	off.LeaderElect = false
	if err := CheckLegacyLocks(t.Context(), off, nil, nil); err != nil {
		t.Error(err)
	}
}
