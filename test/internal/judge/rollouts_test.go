// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package judge

import (
	"fmt"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func TestJudgeFindsRolloutsAndTheirAuthors(t *testing.T) {
	version := func(revision int, uid, image string) *appsv1.Deployment {
		d := &appsv1.Deployment{}
		d.Namespace, d.Name, d.UID, d.ResourceVersion = "ns", "web", types.UID(uid), fmt.Sprint(revision)
		d.Spec.Template.Spec.Containers = []corev1.Container{{Name: "web", Image: image}}
		return d
	}
	const object = "deployments/ns/web"
	patch := func(writer string, d *appsv1.Deployment) auditv1.Event {
		e := newEvent(writer, "patch", "deployments", d)
		e.ObjectRef.APIGroup = appsv1.GroupName
		return e
	}
	for name, tc := range map[string]struct {
		add  func(r *Rollouts) []error
		want []string // REVISION BY
	}{
		"the first version is no rollout, a change of the template is one": {
			func(r *Rollouts) []error {
				return []error{r.AddObject(object, version(1, "u", "a")), r.AddEvent(patch("m", version(3, "u", "b")))}
			}, []string{"3 m"}},
		"a write that leaves the template as it is is no rollout": {
			func(r *Rollouts) []error {
				return []error{r.AddObject(object, version(1, "u", "a")), r.AddEvent(patch("m", version(3, "u", "a")))}
			}, nil},
		"a rollout in the log and in a watch counts once, and its author is known": {
			func(r *Rollouts) []error {
				return []error{r.AddObject(object, version(1, "u", "a")), r.AddEvent(patch("m", version(3, "u", "b"))), r.AddObject(object, version(3, "u", "b"))}
			}, []string{"3 m"}},
		"a rollout that only a watch has shown counts": {
			func(r *Rollouts) []error {
				return []error{r.AddObject(object, version(3, "u", "b")), r.AddEvent(patch("m", version(5, "u", "a"))), r.AddObject(object, version(1, "u", "a"))}
			}, []string{"3 ", "5 m"}},
		"an object created again begins anew": {
			func(r *Rollouts) []error {
				return []error{r.AddObject(object, version(1, "u", "a")), r.AddObject(object, version(3, "v", "b"))}
			}, nil},
		"a patch that was refused changed nothing": {
			func(r *Rollouts) []error {
				refused := patch("m", version(3, "u", "b"))
				refused.ResponseStatus.Code = 409
				return []error{r.AddObject(object, version(1, "u", "a")), r.AddEvent(refused)}
			}, nil},
		"a dry run changed nothing": {
			func(r *Rollouts) []error {
				dry := patch("m", version(3, "u", "b"))
				dry.RequestURI = "/apis/apps/v1/namespaces/ns/deployments/web?dryRun=All"
				return []error{r.AddObject(object, version(1, "u", "a")), r.AddEvent(dry)}
			}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			r := NewRollouts()
			for _, err := range tc.add(r) {
				assert.NoError(t, err)
			}
			var got []string
			for _, v := range r.Find(object) {
				got = append(got, fmt.Sprintf("%d %s", v.Revision, v.Writer))
			}
			assert.Equal(t, "rollouts", tc.want, got)
		})
	}
}
