// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replication

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication/policy"
)

// cached is a Secret as the cache has it.
type cached struct {
	metav1.Object
	digest []byte
}

func (c cached) Digest(string) []byte { return c.digest }

// TestEventIsExpandedByWorkers holds a handler to constant work, whatever an object asks for.
func TestEventIsExpandedByWorkers(t *testing.T) {
	obj := &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "a", Name: "s", Annotations: map[string]string{"quartermaster.dev/push-to": "*"}}}
	cfg := NewConfig()
	var source policy.Cached = cached{obj, policy.NewDigester(cfg.Options, policy.NewDigesterKey()).Digest(runtime.Object(obj))}
	if got := (&controller{}).objectChanged(policy.Secret, controllers.Event[policy.Cached]{Old: source, New: source}); len(got) != 2 {
		t.Errorf("the change of a source with many targets enqueues %d tasks, want 2", len(got))
	}
	if got := namespaceChanged(controllers.Event[metav1.Object]{New: &metav1.ObjectMeta{Name: "n"}}); len(got) != 1 {
		t.Errorf("a new namespace enqueues %d tasks, want 1", len(got))
	}
}

func TestConfigMistakesNameTheirFlags(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"a kind that is not copied":      {func(c *Config) { c.Kinds = []string{"Role"} }, "--replication-kinds"},
		"no kind":                        {func(c *Config) { c.Kinds = nil }, "--replication-kinds"},
		"namespaces that do not parse":   {func(c *Config) { c.PushNamespaces = "A" }, "--replication-push-namespaces"},
		"nothing but excluded ones":      {func(c *Config) { c.PushNamespaces = "!a" }, "--replication-push-namespaces"},
		"a negative grace":               {func(c *Config) { c.DeletionGrace = -1 }, "--replication-deletion-grace-period"},
		"an empty glob":                  {func(c *Config) { c.DeniedLabels = []string{""} }, "--replication-denied-labels"},
		"a glob longer than a namespace": {func(c *Config) { c.ProtectedNamespaces = []string{strings.Repeat("*", 64)} }, "--replication-protected-namespaces"},
		"a negative spread":              {func(c *Config) { c.MaxSpread.Quantity = resource.MustParse("-1") }, "--replication-max-spread"},
		"the defaults are without fault": {func(*Config) {}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := NewConfig()
			tc.change(&cfg)
			err := cfg.Validate(controllers.Settings{})
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("error %v, want one of %q", err, tc.want)
			}
		})
	}
}

func TestRejectionNamesWhoRefusesAndNoValue(t *testing.T) {
	for message, want := range map[string]string{
		`secrets "s" is forbidden: exceeded quota: q`:                                                     `secrets "s" is forbidden: exceeded quota: q`,
		`admission webhook "w.example.com" denied the request: secret`:                                    `admission webhook "w.example.com" denied the request`,
		`Internal error occurred: failed calling webhook "w.example.com": secret`:                         `Internal error occurred: failed calling webhook "w.example.com"`,
		`secrets "s" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: secret`: `secrets "s" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request`,
		`admission webhook "w.example.com" denied the request: exceeded quota: secret`:                    `admission webhook "w.example.com" denied the request`,
		`secret, as admission webhook "w.example.com" denied the request`:                                 "Forbidden",
	} {
		err := newRejection(policy.Create, policy.Key{}, &apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonForbidden, Message: message}})
		if got := strings.TrimPrefix(err.Error(), fmt.Sprintf("%s %s: ", policy.Create, policy.Key{})); got != want {
			t.Errorf("%s: %s, want %s", message, got, want)
		}
	}
}
