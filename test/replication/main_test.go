// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package replication tests the controller replication in managers as processes on a real control
// plane. The objects show what holds in the end, and the audit log what was written.
package replication

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// All tests of the package share a control plane.
var shared *fleet.Fleet

func TestMain(m *testing.M) {
	os.Exit(fleet.Main(m, &shared, fleet.Options{Components: []string{"replication", "replication-compat"}}))
}

// args are the arguments of managers in which config-reload does not run. The installation switches on
// replication and both dialects.
func args(more ...string) []string {
	return append([]string{"--controllers=-config-reload", "--replication-deletion-grace-period=1s", "--replication-push-namespaces=*"}, more...)
}

// fixture is a group of namespaces. In names and annotations, {a} stands for the namespace that the
// test calls a.
type fixture struct {
	*testing.T
	ctx        context.Context
	id         string
	namespaces map[string]string
	started    time.Time
}

var groups atomic.Int64

// newFixture creates the namespaces, each with the label group={id}.
func newFixture(t *testing.T, names ...string) *fixture {
	t.Helper()
	f := &fixture{T: t, ctx: fleet.Context(t), id: fmt.Sprintf("w%d", groups.Add(1)), namespaces: map[string]string{}, started: time.Now()}
	for _, name := range names {
		f.addNamespace(name)
	}
	return f
}

func (f *fixture) addNamespace(name string) {
	f.Helper()
	f.namespaces[name] = shared.NewNamespace(f.ctx, f, map[string]string{"group": f.id, "name": name})
}

// expand replaces {name} by the namespace and {id} by the group's.
func (f *fixture) expand(s string) string {
	s = strings.ReplaceAll(s, "{id}", f.id)
	for name, namespace := range f.namespaces {
		s = strings.ReplaceAll(s, "{"+name+"}", namespace)
	}
	return strings.NewReplacer("Q:", "quartermaster.dev/", "R:", "reflector.v1.k8s.emberstack.com/", "M:", "replicator.v1.mittwald.de/").Replace(s)
}

// split returns the namespace and the name of {a}/s or a/s.
func (f *fixture) split(object string) (namespace, name string) {
	namespace, name, _ = strings.Cut(object, "/")
	if real, ok := f.namespaces[namespace]; ok {
		namespace = real
	}
	return namespace, name
}

// secret creates a Secret with k=v pairs and changes.
func (f *fixture) secret(object, data string, changes ...func(*corev1.Secret)) {
	f.Helper()
	namespace, name := f.split(object)
	s := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}, Data: dataOf(data)}
	for _, change := range changes {
		change(s)
	}
	if _, err := shared.Admin.CoreV1().Secrets(namespace).Create(f.ctx, s, metav1.CreateOptions{}); err != nil {
		f.Fatal(err)
	}
}

func dataOf(text string) map[string][]byte {
	data := map[string][]byte{}
	for pair := range strings.FieldsSeq(text) {
		key, value, _ := strings.Cut(pair, "=")
		data[key] = []byte(value)
	}
	return data
}

// annotated sets annotations: key=value, or key alone to remove it.
func (f *fixture) annotated(pairs ...string) func(*corev1.Secret) {
	return func(s *corev1.Secret) {
		for _, pair := range pairs {
			key, value, has := strings.Cut(f.expand(pair), "=")
			if s.Annotations == nil {
				s.Annotations = map[string]string{}
			}
			if has {
				s.Annotations[key] = value
			} else {
				delete(s.Annotations, key)
			}
		}
	}
}

func holding(data string) func(*corev1.Secret) {
	return func(s *corev1.Secret) { s.Data = dataOf(data) }
}

func typed(t corev1.SecretType) func(*corev1.Secret) { return func(s *corev1.Secret) { s.Type = t } }

// get returns a Secret; nil if it does not exist.
func (f *fixture) get(object string) *corev1.Secret {
	f.Helper()
	namespace, name := f.split(object)
	s, err := shared.Admin.CoreV1().Secrets(namespace).Get(f.ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	assert.NoError(f, err)
	return s
}

// edit changes a Secret, whatever else changes it.
func (f *fixture) edit(object string, changes ...func(*corev1.Secret)) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		s := f.get(object)
		if s == nil {
			return fmt.Errorf("there is no %s", object)
		}
		for _, change := range changes {
			change(s)
		}
		_, err := shared.Admin.CoreV1().Secrets(s.Namespace).Update(f.ctx, s, metav1.UpdateOptions{})
		return err
	})
}

func (f *fixture) remove(object string) {
	f.Helper()
	namespace, name := f.split(object)
	assert.NoError(f, shared.Admin.CoreV1().Secrets(namespace).Delete(f.ctx, name, metav1.DeleteOptions{}))
}

// label sets a label of a namespace; an empty value removes it.
func (f *fixture) label(namespace, key, value string) {
	f.Helper()
	arg := key + "=" + value
	if value == "" {
		arg = key + "-"
	}
	f.kubectl("label", "--overwrite", "namespace", f.namespaces[namespace], arg)
}

func (f *fixture) kubectl(args ...string) string {
	f.Helper()
	out, err := shared.Kubectl(f.ctx, args...)
	assert.NoError(f, err)
	return out
}

// content returns the sorted k=v pairs of a Secret, or "none" if it does not exist.
func (f *fixture) content(object string) string {
	f.Helper()
	s := f.get(object)
	if s == nil {
		return "none"
	}
	var list []string
	for key, value := range s.Data {
		list = append(list, key+"="+string(value))
	}
	slices.Sort(list)
	return strings.Join(list, " ")
}

// waitForContent waits until each Secret holds its content: object: k=v.
func (f *fixture) waitForContent(objects ...string) {
	f.Helper()
	fleet.Eventually(f.ctx, f, func() error {
		for _, text := range objects {
			object, want, _ := strings.Cut(text, ": ")
			if got := f.content(object); got != want {
				return fmt.Errorf("%s holds %q, want %q", object, got, want)
			}
		}
		return nil
	})
}

// settle waits until the controller has decided on everything that happened before: it makes a copy
// that was asked for last.
func (f *fixture) settle() {
	f.Helper()
	name := fmt.Sprintf("canary-%d", time.Now().UnixNano())
	f.secret("a/"+name, "k=v", f.annotated("Q:push-to={b}"))
	f.waitForContent("b/" + name + ": k=v")
	f.edit("a/"+name, f.annotated("Q:push-to"))
	f.waitForContent("b/" + name + ": none")
}

// waitForEvent waits for an Event about a Secret.
func (f *fixture) waitForEvent(object, reason string) {
	f.Helper()
	namespace, name := f.split(object)
	fleet.Eventually(f.ctx, f, func() error {
		events, err := shared.Admin.CoreV1().Events(namespace).List(f.ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + name + ",reason=" + reason})
		if err == nil && len(events.Items) == 0 {
			err = fmt.Errorf("no Event %s on %s", reason, object)
		}
		return err
	})
}

// writes returns the controller's successful writes in the group: verb, namespace/name. Canaries are
// left out.
func (f *fixture) writes() []string {
	f.Helper()
	return f.requests(func(e auditv1.Event) bool { return cluster.AuditWrite(e) })
}

func (f *fixture) requests(match func(auditv1.Event) bool) (list []string) {
	f.Helper()
	names := map[string]string{}
	for name, namespace := range f.namespaces {
		names[namespace] = name
	}
	for _, e := range shared.AuditSince(f, f.started, match) {
		ref := e.ObjectRef
		if cluster.AuditPod(e) == "" || ref == nil || names[ref.Namespace] == "" || ref.Resource != "secrets" && ref.Resource != "configmaps" ||
			strings.HasPrefix(ref.Name, "canary-") {
			continue
		}
		list = append(list, e.Verb+" "+names[ref.Namespace]+"/"+ref.Name)
	}
	slices.Sort(list)
	return list
}

// expectWrites compares the writes so far.
func (f *fixture) expectWrites(want ...string) {
	f.Helper()
	var got []string
	fleet.Eventually(f.ctx, f, func() error { // an object has changed before its write is in the audit log
		if got = f.writes(); len(got) < len(want) {
			return fmt.Errorf("writes %q, want %q", got, want)
		}
		return nil
	})
	slices.Sort(want)
	if !slices.Equal(got, want) {
		f.Errorf("writes %q, want %q", got, want)
	}
}
