// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest_test

import (
	"testing"
	"testing/synctest"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

// TestBuiltInControllersWorkTogether has a Secret that is copied, a Deployment that reads the copy, and
// a time at which the source expires. The three share one cache, in which each resource is once.
func TestBuiltInControllersWorkTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", Annotations: map[string]string{
				"quartermaster.dev/push-to": "b", "quartermaster.dev/expires": "2000-01-01T02:00:00Z"}},
			Data: map[string][]byte{"k": []byte("v")},
		}
		web := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "b", Name: "web", Annotations: map[string]string{"quartermaster.dev/reload": "auto"}}}
		web.Spec.Template.Spec.Containers = []corev1.Container{{Name: "web", EnvFrom: []corev1.EnvFromSource{
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "s"}}}}}}
		h := controllertest.Setup{
			Entries: []controllers.Entry{configreload.Entry(), replication.Entry(), ttl.Entry()},
			Flags:   []string{"--replication-push-namespaces=*", "--ttl-include-resources=secrets"},
			Standby: true,
		}.NewHost(t, source, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "b"}})
		expect(t, "writes", h.Writes(), []string{"replication: create secrets b/s"})
		h.Put(web)
		h.Sleep(time.Minute)
		h.Writes() // config-reload may record what it has seen

		source.Data["k"] = []byte("w")
		h.Put(source)
		h.Sleep(time.Minute)
		expect(t, "writes after a change", h.Writes(), []string{"replication: update secrets b/s", "config-reload: patch deployments.apps b/web"})

		h.Restart()
		h.Sleep(2 * time.Hour)
		expect(t, "writes of the standby", h.Writes(), []string{"ttl: delete secrets a/s", "replication: delete secrets b/s"})
	})
}
