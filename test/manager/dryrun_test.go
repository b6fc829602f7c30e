// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	autoscalingv1apply "k8s.io/client-go/applyconfigurations/autoscaling/v1"
	corev1apply "k8s.io/client-go/applyconfigurations/core/v1"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestDryRunOfEveryVerbAndForm has a hosted controller try all ways to write. None may change what
// is stored. For each, the API server must see a dry run, or nothing if that way cannot be a dry
// run.
func TestDryRunOfEveryVerbAndForm(t *testing.T) {
	ctx := fleet.Context(t)
	serveGadgets(ctx, t)
	if _, err := shared.Kubectl(ctx, "apply", "-f", "testdata/aggregated.yaml"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if _, err := shared.Kubectl(context.Background(), "delete", "-f", "testdata/aggregated.yaml"); err != nil {
			t.Error(err)
		}
	})
	var everything []rbacv1.PolicyRule
	for _, group := range []string{"", "apps", "policy", gadgets.Group, "aggregated.example.com"} {
		everything = append(everything, rbacv1.PolicyRule{APIGroups: []string{group}, Resources: []string{"*"}, Verbs: []string{"*"}})
	}
	everything = append(everything, rbacv1.PolicyRule{NonResourceURLs: []string{"*"}, Verbs: []string{"*"}},
		// as manager rbac --dry-run has it
		rbacv1.PolicyRule{APIGroups: []string{"apiregistration.k8s.io"}, Resources: []string{"apiservices"}, Verbs: []string{"get"}})
	sample := newDrySample(ctx, t)
	h := runHosted(ctx, t, controllers.Entry{Permissions: func(controllers.Settings) []rbacv1.PolicyRule { return everything }}, true)
	before := sample.versions(ctx, t)

	jsonClient, err := kubernetes.NewForConfig(h.RESTConfig)
	assert.NoError(t, err)
	dyn, err := dynamic.NewForConfig(h.RESTConfig)
	assert.NoError(t, err)
	meta, err := metadata.NewForConfig(h.RESTConfig)
	assert.NoError(t, err)
	ns, now := sample.namespace, time.Now()
	core, apps, raw := h.Client.CoreV1(), h.Client.AppsV1(), h.Client.CoreV1().RESTClient()
	dynamicGadgets := dyn.Resource(gadgets).Namespace(ns)
	gadget := func(name string) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": "test.example.com/v1", "kind": "Gadget", "metadata": map[string]any{"name": name, "namespace": ns},
			"spec": map[string]any{"color": "red"}, "status": map[string]any{"color": "red"},
		}}
	}
	path := "/api/v1/namespaces/" + ns
	force := metav1.ApplyOptions{FieldManager: "test", Force: true}
	uid := metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(sample.configMap.UID))}
	red := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: ns}, Data: map[string]string{"color": "red"}}

	sent := 0
	for name, tc := range map[string]struct {
		send    func() error
		refused bool
	}{
		"create": {send: func() error {
			_, err := core.ConfigMaps(ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "new"}}, metav1.CreateOptions{})
			return err
		}},
		"update": {send: func() error { _, err := core.ConfigMaps(ns).Update(ctx, red, metav1.UpdateOptions{}); return err }},
		"patch, JSON": {send: func() error {
			_, err := core.ConfigMaps(ns).Patch(ctx, "a", types.JSONPatchType, []byte(`[{"op":"add","path":"/data","value":{"a":"b"}}]`), metav1.PatchOptions{})
			return err
		}},
		"patch, merge": {send: func() error {
			_, err := core.ConfigMaps(ns).Patch(ctx, "a", types.MergePatchType, []byte(`{"data":{"a":"b"}}`), metav1.PatchOptions{})
			return err
		}},
		"patch, strategic merge": {send: func() error {
			_, err := core.ConfigMaps(ns).Patch(ctx, "a", types.StrategicMergePatchType, []byte(`{"data":{"a":"b"}}`), metav1.PatchOptions{})
			return err
		}},
		"patch, apply": {send: func() error {
			_, err := core.ConfigMaps(ns).Apply(ctx, corev1apply.ConfigMap("a", ns).WithData(map[string]string{"a": "b"}), force)
			return err
		}},
		"apply of what does not exist": {send: func() error {
			_, err := core.ConfigMaps(ns).Apply(ctx, corev1apply.ConfigMap("new", ns).WithData(map[string]string{"a": "b"}), force)
			return err
		}},
		"delete":                    {send: func() error { return core.ConfigMaps(ns).Delete(ctx, "a", metav1.DeleteOptions{}) }},
		"delete of one of this UID": {send: func() error { return core.ConfigMaps(ns).Delete(ctx, "a", uid) }},
		"delete in the foreground":  {send: func() error { return apps.Deployments(ns).Delete(ctx, "web", foreground) }},
		"delete of a collection": {send: func() error {
			return core.ConfigMaps(ns).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		}},
		"delete of a Pod, at once":    {send: func() error { return core.Pods(ns).Delete(ctx, "running", *metav1.NewDeleteOptions(0)) }},
		"delete of a namespace":       {send: func() error { return core.Namespaces().Delete(ctx, ns, metav1.DeleteOptions{}) }},
		"delete in JSON":              {send: func() error { return jsonClient.CoreV1().ConfigMaps(ns).Delete(ctx, "a", uid) }},
		"delete by a dynamic client":  {send: func() error { return dynamicGadgets.Delete(ctx, "a", metav1.DeleteOptions{}) }},
		"delete by a metadata client": {send: func() error { return meta.Resource(gadgets).Namespace(ns).Delete(ctx, "a", metav1.DeleteOptions{}) }},
		"delete of a collection by a dynamic client": {send: func() error {
			return dynamicGadgets.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		}},
		"delete of a collection by a metadata client": {send: func() error {
			return meta.Resource(gadgets).Namespace(ns).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		}},
		"raw delete without a body": {send: func() error { return raw.Delete().AbsPath(path, "configmaps/a").Do(ctx).Error() }},
		"raw delete without a content type": {send: func() error {
			return raw.Delete().AbsPath(path, "configmaps/a").Body([]byte(`{"kind":"DeleteOptions","apiVersion":"v1"}`)).Do(ctx).Error()
		}},
		"raw delete in another form than JSON": {refused: true, send: func() error {
			return raw.Delete().AbsPath(path, "configmaps/a").SetHeader("Content-Type", "application/yaml").Body([]byte("kind: DeleteOptions\napiVersion: v1\n")).Do(ctx).Error()
		}},
		"raw create": {send: func() error {
			return raw.Post().AbsPath(path, "configmaps").SetHeader("Content-Type", "application/json").
				Body([]byte(`{"kind":"ConfigMap","apiVersion":"v1","metadata":{"name":"new"}}`)).Do(ctx).Error()
		}},
		"eviction of a Pod that waits": {send: func() error {
			return core.Pods(ns).EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "pending"}})
		}},
		"eviction of a Pod that runs, with options": {send: func() error {
			return core.Pods(ns).EvictV1(ctx, &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: "running"}, DeleteOptions: metav1.NewDeleteOptions(0)})
		}},
		"binding": {send: func() error {
			return core.Pods(ns).Bind(ctx, &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Name: "pending"}, Target: corev1.ObjectReference{Kind: "Node", Name: "n"}}, metav1.CreateOptions{})
		}},
		"binding in its old form": {send: func() error {
			return raw.Post().AbsPath(path, "bindings").SetHeader("Content-Type", "application/json").
				Body([]byte(`{"kind":"Binding","apiVersion":"v1","metadata":{"name":"pending"},"target":{"kind":"Node","name":"n"}}`)).Do(ctx).Error()
		}},
		"status": {send: func() error {
			pod := sample.pod.DeepCopy()
			pod.Status.Message = "changed"
			_, err := core.Pods(ns).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
			return err
		}},
		"ephemeral container": {send: func() error {
			pod := sample.pod.DeepCopy()
			pod.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
				Name: "e", Image: "x", TerminationMessagePolicy: corev1.TerminationMessageReadFile, ImagePullPolicy: corev1.PullAlways,
			}}}
			_, err := core.Pods(ns).UpdateEphemeralContainers(ctx, "running", pod, metav1.UpdateOptions{})
			return err
		}},
		"scale": {send: func() error {
			_, err := apps.Deployments(ns).UpdateScale(ctx, "web", &autoscalingv1.Scale{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: ns}, Spec: autoscalingv1.ScaleSpec{Replicas: 7}}, metav1.UpdateOptions{})
			return err
		}},
		"scale, apply": {send: func() error {
			_, err := apps.Deployments(ns).ApplyScale(ctx, "web", autoscalingv1apply.Scale().WithSpec(autoscalingv1apply.ScaleSpec().WithReplicas(7)), force)
			return err
		}},
		"finalization of a namespace": {send: func() error {
			_, err := core.Namespaces().Finalize(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: ns}}, metav1.UpdateOptions{})
			return err
		}},
		"create by a dynamic client": {send: func() error { _, err := dynamicGadgets.Create(ctx, gadget("new"), metav1.CreateOptions{}); return err }},
		"update by a dynamic client": {send: func() error {
			changed := gadget("a")
			changed.SetResourceVersion(before["gadgets/a"])
			_, err := dynamicGadgets.Update(ctx, changed, metav1.UpdateOptions{})
			return err
		}},
		"apply by a dynamic client":   {send: func() error { _, err := dynamicGadgets.Apply(ctx, "a", gadget("a"), force); return err }},
		"status of a custom resource": {send: func() error { _, err := dynamicGadgets.ApplyStatus(ctx, "a", gadget("a"), force); return err }},
		"scale of a custom resource": {send: func() error {
			_, err := dynamicGadgets.Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"replicas":7}}`), metav1.PatchOptions{}, "scale")
			return err
		}},
		"patch by a metadata client": {send: func() error {
			_, err := meta.Resource(gadgets).Namespace(ns).Patch(ctx, "a", types.MergePatchType, []byte(`{"metadata":{"labels":{"a":"b"}}}`), metav1.PatchOptions{})
			return err
		}},

		"token": {refused: true, send: func() error {
			_, err := core.ServiceAccounts(ns).CreateToken(ctx, "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
			return err
		}},
		"command in a container": {refused: true, send: func() error {
			return raw.Post().AbsPath(path, "pods/running/exec").Param("command", "rm").Do(ctx).Error()
		}},
		"command in a container by GET": {refused: true, send: func() error {
			return raw.Get().AbsPath(path, "pods/running/exec").Param("command", "rm").Do(ctx).Error()
		}},
		"attach":                 {refused: true, send: func() error { return raw.Post().AbsPath(path, "pods/running/attach").Do(ctx).Error() }},
		"portforward":            {refused: true, send: func() error { return raw.Post().AbsPath(path, "pods/running/portforward").Do(ctx).Error() }},
		"proxy of a Pod by POST": {refused: true, send: func() error { return raw.Post().AbsPath(path, "pods/running/proxy/x").Do(ctx).Error() }},
		"proxy of a Pod by GET":  {refused: true, send: func() error { _, err := core.Pods(ns).ProxyGet("", "running", "", "x", nil).DoRaw(ctx); return err }},
		"what is no resource":    {refused: true, send: func() error { return raw.Put().AbsPath("/debug/flags/v").Body([]byte("9")).Do(ctx).Error() }},
		"aggregated API": {refused: true, send: func() error {
			_, err := dyn.Resource(schema.GroupVersionResource{Group: "aggregated.example.com", Version: "v1", Resource: "things"}).
				Create(ctx, gadget("new"), metav1.CreateOptions{})
			return err
		}},
	} {
		t.Run(name, func(t *testing.T) {
			err := tc.send()
			var refused *controllers.DryRunError
			switch {
			case tc.refused && !errors.As(err, &refused):
				t.Errorf("not refused: %v", err)
			case !tc.refused && err != nil:
				t.Errorf("it fails: %v", err)
			}
		})
		if !tc.refused {
			sent++
		}
	}

	if diff := cmp.Diff(before, sample.versions(ctx, t)); diff != "" {
		t.Errorf("what is stored has changed:\n%s", diff)
	}
	var requests []auditv1.Event
	fleet.Eventually(ctx, t, func() error { // the API server logs a request after its response
		requests = shared.AuditSince(t, now, func(e auditv1.Event) bool {
			return e.Stage == auditv1.StageResponseComplete && slices.Contains([]string{"create", "update", "patch", "delete", "deletecollection", "put", "post"}, e.Verb) &&
				cluster.AuditPod(e) == h.pod && e.ObjectRef != nil && (e.ObjectRef.Namespace == ns || e.ObjectRef.Name == ns || e.ObjectRef.APIGroup == "aggregated.example.com")
		})
		if len(requests) < sent {
			return fmt.Errorf("%d of %d requests in the audit log", len(requests), sent)
		}
		return nil
	})
	if len(requests) > sent {
		t.Errorf("%d requests in the audit log, want %d", len(requests), sent)
	}
	for _, e := range requests {
		uri, err := url.Parse(e.RequestURI)
		if err != nil || !slices.Equal(uri.Query()["dryRun"], []string{"All"}) {
			t.Errorf("not a dry run: %s %s", e.Verb, e.RequestURI)
		}
	}
	for _, e := range shared.AuditSince(t, now, func(e auditv1.Event) bool { return cluster.AuditPod(e) == h.pod }) {
		if e.ObjectRef == nil && e.Verb != "get" || e.ObjectRef != nil && slices.Contains([]string{"exec", "attach", "portforward", "proxy", "token"}, e.ObjectRef.Subresource) {
			t.Errorf("it was sent: %s %s", e.Verb, e.RequestURI)
		}
	}
}

var foreground = metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)}

// drySample is a sample with one object of each resource on which the dry run is tried.
type drySample struct {
	namespace string
	configMap *corev1.ConfigMap
	pod       *corev1.Pod
}

func newDrySample(ctx context.Context, t *testing.T) drySample {
	t.Helper()
	s := drySample{namespace: shared.NewSample(ctx, t).Namespace}
	client := shared.Admin.CoreV1()
	var err error
	if s.configMap, err = client.ConfigMaps(s.namespace).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "a"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"pending", "running"} {
		spec := corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "x"}}, ServiceAccountName: "default", AutomountServiceAccountToken: ptr.To(false)}
		fleet.Eventually(ctx, t, func() error { // the account must exist
			s.pod, err = client.Pods(s.namespace).Create(ctx, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: spec}, metav1.CreateOptions{})
			return err
		})
	}
	// kube-controller-manager's, which would count as a change.
	fleet.Eventually(ctx, t, func() error {
		_, err := client.ConfigMaps(s.namespace).Get(ctx, "kube-root-ca.crt", metav1.GetOptions{})
		return err
	})
	s.pod.Status.Phase = corev1.PodRunning
	if s.pod, err = client.Pods(s.namespace).UpdateStatus(ctx, s.pod, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	dyn, err := dynamic.NewForConfig(shared.AdminConfig())
	assert.NoError(t, err)
	gadget := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "test.example.com/v1", "kind": "Gadget", "metadata": map[string]any{"name": "a"}, "spec": map[string]any{"replicas": int64(1)},
	}}
	if _, err := dyn.Resource(gadgets).Namespace(s.namespace).Create(ctx, gadget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return s
}

// versions returns what shows a change of every object in the namespace, and of the namespace
// itself.
func (d drySample) versions(ctx context.Context, t *testing.T) map[string]string {
	t.Helper()
	meta, err := metadata.NewForConfig(shared.AdminConfig())
	assert.NoError(t, err)
	versions := map[string]string{}
	for _, resource := range []schema.GroupVersionResource{
		corev1.SchemeGroupVersion.WithResource("configmaps"), corev1.SchemeGroupVersion.WithResource("pods"),
		corev1.SchemeGroupVersion.WithResource("serviceaccounts"), appsv1.SchemeGroupVersion.WithResource("deployments"), gadgets,
	} {
		// The Pods of the Deployment are left out: kube-controller-manager creates them and writes
		// their number into its status.
		list, err := meta.Resource(resource).Namespace(d.namespace).List(ctx, metav1.ListOptions{LabelSelector: "!app"})
		assert.NoError(t, err)
		for _, item := range list.Items {
			version := item.ResourceVersion
			if resource.Resource == "deployments" {
				version = fmt.Sprint(item.UID, item.Generation, item.DeletionTimestamp)
			}
			versions[resource.Resource+"/"+item.Name] = version
		}
	}
	ns, err := shared.Admin.CoreV1().Namespaces().Get(ctx, d.namespace, metav1.GetOptions{})
	assert.NoError(t, err)
	versions["namespace"] = ns.ResourceVersion
	return versions
}
