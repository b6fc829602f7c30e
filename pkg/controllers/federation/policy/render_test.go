// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"errors"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

type rendering struct {
	kind string // of the target; default: ConfigMap
	spec string
	// live is the object of the cluster, "" to create it.
	live            string
	isHostNamespace bool
	// want is the object, or failStatus the status of the cluster.
	want, failStatus string
}

// run renders for the cluster c1.
func (r rendering) run(t *testing.T) {
	t.Helper()
	if r.kind == "" {
		r.kind = "ConfigMap"
	}
	f := object(t, "spec: {"+r.spec+"}")
	request := RenderRequest{Type: typeOf(r.kind), Federated: ReadFederated(f), Cluster: "c1", IsHostNamespace: r.isHostNamespace}
	before := f.DeepCopy()
	var live *unstructured.Unstructured
	if r.live != "" {
		request.Live = object(t, r.live)
		live = request.Live.DeepCopy()
	}
	got, err := Render(request)
	assert.Equal(t, "federated object after Render", before, f)
	if live != nil {
		assert.Equal(t, "live object after Render", live, request.Live)
	}
	if r.failStatus != "" {
		failure := (*Failure)(nil)
		if !errors.As(err, &failure) || failure.Status != r.failStatus {
			t.Errorf("%v and %v, want %s", got, err, r.failStatus)
		}
		return
	}
	assert.NoError(t, err)
	want := object(t, r.want)
	// What JSON cannot tell apart is the same.
	wantJSON, _ := want.MarshalJSON()
	gotJSON, _ := got.MarshalJSON()
	assert.Equal(t, "rendered object", string(wantJSON), string(gotJSON))
}

// managed returns the metadata of an object f in ns with the label, and more.
func managed(more string) string {
	return "metadata: {name: f, namespace: ns, labels: {kubefed.io/managed: 'true'}" + more + "}"
}

func TestRenderMakesTheObjectOfACluster(t *testing.T) {
	const cm = "apiVersion: v1, kind: ConfigMap, "
	tests := map[string]rendering{
		"a template":                     {spec: "template: {data: {a: b}}", want: cm + managed("") + ", data: {a: b}"},
		"an object without a template":   {spec: "placement: {}", want: cm + managed("")},
		"a template that is null":        {spec: "template: null", want: cm + managed("")},
		"a template that is text":        {spec: "template: text", failStatus: ComputeResourceFailed},
		"labels of the template":         {spec: "template: {metadata: {labels: {a: b}}}", want: cm + "metadata: {name: f, namespace: ns, labels: {a: b, kubefed.io/managed: 'true'}}"},
		"labels that are null":           {spec: "template: {metadata: {labels: null}}", want: cm + managed("")},
		"labels that are numbers":        {spec: "template: {metadata: {labels: {a: 1}}}", failStatus: ComputeResourceFailed},
		"labels that are text":           {spec: "template: {metadata: {labels: a}}", failStatus: ComputeResourceFailed},
		"a label that says not managed":  {spec: "template: {metadata: {labels: {kubefed.io/managed: 'false'}}}", want: cm + managed("")},
		"a status":                       {spec: "template: {data: {a: b}, status: {a: b}}", want: cm + managed("") + ", data: {a: b}"},
		"all other metadata is dropped":  {spec: "template: {metadata: {name: g, namespace: other, generateName: g-, annotations: {a: b}, finalizers: [a/b], ownerReferences: [{name: a}], uid: u}}", want: cm + managed("")},
		"a template of another kind":     {spec: "template: {kind: Secret}", want: cm + managed("")},
		"a template of another version":  {kind: "Deployment", spec: "template: {apiVersion: apps/v1beta1}", want: "apiVersion: apps/v1beta1, kind: Deployment, " + managed("")},
		"a template without a version":   {kind: "Deployment", spec: "template: {}", want: "apiVersion: apps/v1, kind: Deployment, " + managed("")},
		"an empty version":               {kind: "Deployment", spec: "template: {apiVersion: ''}", want: "apiVersion: apps/v1, kind: Deployment, " + managed("")},
		"a template of another group":    {kind: "Deployment", spec: "template: {apiVersion: example.com/v1}", failStatus: ComputeResourceFailed},
		"a version that is none":         {kind: "Deployment", spec: "template: {apiVersion: apps/v1/x}", failStatus: ComputeResourceFailed},
		"a version that is a number":     {spec: "template: {apiVersion: 1}", failStatus: ComputeResourceFailed},
		"a Namespace is in no namespace": {kind: "Namespace", spec: "template: {}", want: "apiVersion: v1, kind: Namespace, metadata: {name: f, labels: {kubefed.io/managed: 'true'}}"},
		"overrides of another cluster":   {spec: "template: {data: {a: b}}, overrides: [{clusterName: c2, clusterOverrides: [{path: /data/a, value: c}]}]", want: cm + managed("") + ", data: {a: b}"},
	}
	for name, tc := range tests {
		t.Run(name, tc.run)
	}
}

func TestRenderKeepsWhatBelongsToTheCluster(t *testing.T) {
	const (
		cm       = "apiVersion: v1, kind: ConfigMap, "
		service  = "apiVersion: v1, kind: Service, "
		account  = "apiVersion: v1, kind: ServiceAccount, "
		ns       = "apiVersion: v1, kind: Namespace, metadata: {name: f, "
		job      = "apiVersion: batch/v1, kind: Job, "
		deploy   = "apiVersion: apps/v1, kind: Deployment, "
		live     = "metadata: {name: f, namespace: ns, resourceVersion: '7'}, "
		rv       = ", resourceVersion: '7'"
		jobLive  = "selector: {matchLabels: {controller-uid: u}}, template: {metadata: {labels: {a: old, controller-uid: u, job-name: f, batch.kubernetes.io/controller-uid: u, batch.kubernetes.io/job-name: f}}}"
		jobSpec  = "template: {metadata: {labels: {a: new}}}"
		replicas = "template: {spec: {replicas: 3}}"
		widget   = "apiVersion: example.com/v1, kind: Widget, "
	)
	tests := map[string]rendering{
		"a cluster's UID, resourceVersion, annotations, finalizers and owners stay": {spec: "template: {data: {a: b}}",
			live: "metadata: {name: f, namespace: ns, resourceVersion: '7', uid: u, generation: 3, annotations: {x: v}, finalizers: [a/b], ownerReferences: [{name: o}]}, data: {a: c, d: e}",
			want: cm + managed(", uid: u, resourceVersion: '7', annotations: {x: v}, finalizers: [a/b], ownerReferences: [{name: o}]") + ", data: {a: b}"},
		"a label that the cluster added goes": {spec: "template: {}", live: "metadata: {name: f, namespace: ns, resourceVersion: '7', labels: {x: v}}", want: cm + managed(rv)},
		"a cluster's labels of a Namespace stay": {kind: "Namespace", spec: "template: {metadata: {labels: {a: b, c: d}}}", live: "metadata: {name: f, resourceVersion: '7', labels: {a: x, member: m, kubefed.io/managed: 'true'}}",
			want: ns + "resourceVersion: '7', labels: {a: b, c: d, member: m, kubefed.io/managed: 'true'}}"},
		"a Namespace without labels in the template": {kind: "Namespace", spec: "template: {}", live: "metadata: {name: f, labels: {member: m, kubefed.io/managed: 'true'}}",
			want: ns + "labels: {member: m, kubefed.io/managed: 'true'}}"},
		"a Namespace that was there is marked as adopted": {kind: "Namespace", spec: "template: {}", live: "metadata: {name: f, labels: {member: m}}",
			want: ns + "labels: {member: m, kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}"},
		"a Namespace with annotations that was there is marked as adopted": {kind: "Namespace", spec: "template: {}", live: "metadata: {name: f, annotations: {x: v}}",
			want: ns + "labels: {kubefed.io/managed: 'true'}, annotations: {x: v, quartermaster.dev/federation-adopted: 'true'}}"},
		"a Namespace that was adopted stays adopted": {kind: "Namespace", spec: "template: {}", live: "metadata: {name: f, labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}",
			want: ns + "labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}"},
		"the host's own is not adopted": {kind: "Namespace", isHostNamespace: true, spec: "template: {}", live: "metadata: {name: f}", want: ns + "labels: {kubefed.io/managed: 'true'}}"},
		"other objects are not adopted": {spec: "template: {}", live: "metadata: {name: f, namespace: ns}", want: cm + managed("")},
		"an override drops the annotations of a Namespace that was there before": {kind: "Namespace", live: "metadata: {name: f, annotations: {x: v}}",
			spec: "template: {}, overrides: [{clusterName: c1, clusterOverrides: [{op: remove, path: /metadata/annotations}]}]",
			want: ns + "labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}"},
		"a Namespace stays adopted, whatever an override removes": {kind: "Namespace", live: "metadata: {name: f, labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}",
			spec: "template: {}, overrides: [{clusterName: c1, clusterOverrides: [{op: remove, path: /metadata/annotations}]}]",
			want: ns + "labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}"},
		"a Namespace stays adopted, whatever an override says": {kind: "Namespace", live: "metadata: {name: f, labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}",
			spec: "template: {}, overrides: [{clusterName: c1, clusterOverrides: [{path: /metadata/annotations/quartermaster.dev~1federation-adopted, value: 'false'}]}]",
			want: ns + "labels: {kubefed.io/managed: 'true'}, annotations: {quartermaster.dev/federation-adopted: 'true'}}"},
		"a cluster's status stays": {kind: "Widget", spec: "template: {status: {a: b}}", live: live + "status: {c: d}", want: widget + managed(rv) + ", status: {c: d}"},
		"the claim that has bound a volume, and the volume's nodes": {kind: "PersistentVolume", spec: "template: {spec: {a: new}}", live: live + "spec: {a: old, claimRef: {namespace: ns, name: c, uid: u}, nodeAffinity: {x: v}}",
			want: "apiVersion: v1, kind: PersistentVolume, " + managed(rv) + ", spec: {a: new, claimRef: {namespace: ns, name: c, uid: u}, nodeAffinity: {x: v}}"},
		"the UID of a claim in the template": {kind: "PersistentVolume", spec: "template: {spec: {claimRef: {namespace: ns, name: c}}}", live: live + "spec: {claimRef: {namespace: ns, name: c, uid: u}}",
			want: "apiVersion: v1, kind: PersistentVolume, " + managed(rv) + ", spec: {claimRef: {namespace: ns, name: c, uid: u}}"},
		"another claim in the template": {kind: "PersistentVolume", spec: "template: {spec: {claimRef: {namespace: ns, name: d}}}", live: live + "spec: {claimRef: {namespace: ns, name: c, uid: u}}",
			want: "apiVersion: v1, kind: PersistentVolume, " + managed(rv) + ", spec: {claimRef: {namespace: ns, name: d}}"},
		"a claim that is text": {kind: "PersistentVolume", spec: "template: {spec: {claimRef: x}}", live: live + "spec: {claimRef: {name: c}}", failStatus: FieldRetentionFailed},
		"a volume's name and a storage class": {kind: "PersistentVolumeClaim", spec: "template: {spec: {}}", live: live + "spec: {volumeName: v, storageClassName: s}",
			want: "apiVersion: v1, kind: PersistentVolumeClaim, " + managed(rv) + ", spec: {volumeName: v, storageClassName: s}"},
		"a storage class in the template": {kind: "PersistentVolumeClaim", spec: "template: {spec: {storageClassName: ''}}", live: live + "spec: {volumeName: v, storageClassName: s}",
			want: "apiVersion: v1, kind: PersistentVolumeClaim, " + managed(rv) + ", spec: {volumeName: v, storageClassName: ''}"},
		"the default class of an Ingress": {kind: "Ingress", spec: "template: {spec: {}}", live: live + "spec: {ingressClassName: c}",
			want: "apiVersion: networking.k8s.io/v1, kind: Ingress, " + managed(rv) + ", spec: {ingressClassName: c}"},
		"rules that a ClusterRole aggregates": {kind: "ClusterRole", spec: "template: {aggregationRule: {x: v}, rules: []}", live: live + "rules: [{a: b}]",
			want: "apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, " + managed(rv) + ", aggregationRule: {x: v}, rules: [{a: b}]"},
		"rules of other ClusterRoles": {kind: "ClusterRole", spec: "template: {rules: [{c: d}]}", live: live + "rules: [{a: b}]",
			want: "apiVersion: rbac.authorization.k8s.io/v1, kind: ClusterRole, " + managed(rv) + ", rules: [{c: d}]"},
		"a load balancer's class":                 {kind: "Service", spec: "template: {spec: {type: LoadBalancer}}", live: live + "spec: {type: LoadBalancer, loadBalancerClass: x/y, clusterIP: 10.0.0.1}", want: service + managed(rv) + ", spec: {type: LoadBalancer, loadBalancerClass: x/y}"},
		"a load balancer's class in the template": {kind: "Service", spec: "template: {spec: {loadBalancerClass: a/b}}", live: live + "spec: {loadBalancerClass: x/y}", want: service + managed(rv) + ", spec: {loadBalancerClass: a/b}"},
		"a Service without":                       {kind: "Service", spec: "template: {spec: {}}", live: live + "spec: {clusterIP: 10.0.0.1}", want: service + managed(rv) + ", spec: {}"},
		"a Service whose spec is text":            {kind: "Service", spec: "template: {spec: x}", live: live + "spec: {loadBalancerClass: x/y}", failStatus: FieldRetentionFailed},
		"secrets of a ServiceAccount":             {kind: "ServiceAccount", spec: "template: {}", live: live + "secrets: [{name: s}]", want: account + managed(rv) + ", secrets: [{name: s}]"},
		"secrets in the template":                 {kind: "ServiceAccount", spec: "template: {secrets: [{name: mine}]}", live: live + "secrets: [{name: s}]", want: account + managed(rv) + ", secrets: [{name: mine}]"},
		"an empty list in the template":           {kind: "ServiceAccount", spec: "template: {secrets: []}", live: live + "secrets: [{name: s}]", want: account + managed(rv) + ", secrets: [{name: s}]"},
		"secrets of another type are data":        {spec: "template: {}", live: live + "secrets: [{name: s}]", want: cm + managed(rv)},
		"a Job keeps its generated selector and labels": {kind: "Job", spec: "template: {spec: {" + jobSpec + "}}", live: live + "spec: {" + jobLive + "}",
			want: job + managed(rv) + ", spec: {selector: {matchLabels: {controller-uid: u}}, template: {metadata: {labels: {a: new, controller-uid: u, job-name: f, batch.kubernetes.io/controller-uid: u, batch.kubernetes.io/job-name: f}}}}"},
		"a Job with manualSelector": {kind: "Job", spec: "template: {spec: {manualSelector: true, selector: {matchLabels: {x: v}}, " + jobSpec + "}}", live: live + "spec: {" + jobLive + "}",
			want: job + managed(rv) + ", spec: {manualSelector: true, selector: {matchLabels: {x: v}}, " + jobSpec + "}"},
		"a Job without a spec in the cluster":                        {kind: "Job", spec: "template: {spec: {" + jobSpec + "}}", live: live + "x: v", want: job + managed(rv) + ", spec: {" + jobSpec + "}"},
		"a Job whose manualSelector is text":                         {kind: "Job", spec: "template: {spec: {manualSelector: x}}", live: live + "spec: {" + jobLive + "}", failStatus: FieldRetentionFailed},
		"a Job whose template is text":                               {kind: "Job", spec: "template: {spec: {template: x}}", live: live + "spec: {" + jobLive + "}", failStatus: FieldRetentionFailed},
		"retainReplicas keeps the cluster's replicas":                {kind: "Deployment", spec: replicas + ", retainReplicas: true", live: live + "spec: {replicas: 7}", want: deploy + managed(rv) + ", spec: {replicas: 7}"},
		"the template's replicas are written without retainReplicas": {kind: "Deployment", spec: replicas, live: live + "spec: {replicas: 7}", want: deploy + managed(rv) + ", spec: {replicas: 3}"},
		"retainReplicas is false":                                    {kind: "Deployment", spec: replicas + ", retainReplicas: false", live: live + "spec: {replicas: 7}", want: deploy + managed(rv) + ", spec: {replicas: 3}"},
		"retainReplicas is text":                                     {kind: "Deployment", spec: replicas + ", retainReplicas: x", live: live + "spec: {replicas: 7}", failStatus: FieldRetentionFailed},
		"retainReplicas of a custom resource":                        {kind: "Widget", spec: "template: {}, retainReplicas: true", live: live + "spec: {replicas: 7}", want: widget + managed(rv) + ", spec: {replicas: 7}"},
		"retainReplicas and none in it":                              {kind: "Deployment", spec: replicas + ", retainReplicas: true", live: live + "spec: {}", want: deploy + managed(rv) + ", spec: {replicas: 3}"},
		"retainReplicas of a new object":                             {kind: "Deployment", spec: replicas + ", retainReplicas: true", want: deploy + managed("") + ", spec: {replicas: 3}"},
		"retainReplicas, and the spec is text":                       {kind: "Deployment", spec: "template: {spec: x}, retainReplicas: true", live: live + "spec: {replicas: 7}", failStatus: FieldRetentionFailed},
		"an override of what is retained": {kind: "Deployment", spec: replicas + ", retainReplicas: true, overrides: [{clusterName: c1, clusterOverrides: [{path: /spec/replicas, value: 1}]}]",
			live: live + "spec: {replicas: 7}", want: deploy + managed(rv) + ", spec: {replicas: 1}"},
	}
	for name, tc := range tests {
		t.Run(name, tc.run)
	}
}
