// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package deploy

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"testing"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// TestElectionHasAPriorityLevelOfItsOwn asks the API server how it classifies requests of a manager.
func TestElectionHasAPriorityLevelOfItsOwn(t *testing.T) {
	ctx := fleet.Context(t)
	schema, err := shared.Admin.FlowcontrolV1().FlowSchemas().Get(ctx, "quartermaster-leader-election", metav1.GetOptions{})
	assert.NoError(t, err)
	if got := schema.Spec.PriorityLevelConfiguration.Name; got != "leader-election" {
		t.Errorf("the level is %s", got)
	}
	config := shared.NewReplica(ctx, t).Config()
	client, err := rest.HTTPClientFor(config)
	assert.NoError(t, err)
	lease, leader := "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", "/api/v1/namespaces/quartermaster-leader"
	for request, elects := range map[[2]string]bool{
		{http.MethodGet, lease + "/quartermaster"}:                                                           true,
		{http.MethodGet, lease + "?watch=true&timeoutSeconds=1&fieldSelector=metadata.name%3Dquartermaster"}: true,
		{http.MethodPut, lease + "/quartermaster"}:                                                           true,
		{http.MethodPost, lease}:                                                                             true,
		{http.MethodGet, lease}:                                                                              true,
		{http.MethodGet, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes"}:           true,
		{http.MethodGet, leader}:                                                                             true,
		{http.MethodPatch, leader}:                                                                           true,
		{http.MethodGet, "/api/v1/namespaces/default/configmaps"}:                                            false,
	} {
		fleet.Eventually(ctx, t, func() error { // the API server may not have seen the schema yet
			got, err := matchedFlowSchema(ctx, client, request[0], config.Host+request[1])
			if err == nil && (got == string(schema.UID)) != elects {
				err = fmt.Errorf("%v: FlowSchema %s", request, got)
			}
			return err
		})
	}
}

func matchedFlowSchema(ctx context.Context, client *http.Client, method, url string) (uid string, err error) {
	req, err := http.NewRequestWithContext(ctx, method, url, nil)
	if err != nil {
		return "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	return resp.Header.Get(flowcontrolv1.ResponseHeaderMatchedFlowSchemaUID), nil
}

// TestFenceIsInstalledWithItsNamespace checks that kustomize has not renamed the
// Namespace, and that the managers mean the same one.
func TestFenceIsInstalledWithItsNamespace(t *testing.T) {
	ctx := fleet.Context(t)
	fenced := 0
	for name, kustomization := range installations(t) {
		var namespaces, parameters []string
		lease := types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: fleet.LeaseName}
		for _, o := range parseObjects(t, render(ctx, t, kustomization)) {
			switch o.GetKind() {
			case "Lease":
				lease.Namespace = o.GetNamespace()
			case "Namespace":
				namespaces = append(namespaces, o.GetName())
			case "ValidatingAdmissionPolicyBinding":
				// Other policies have no parameter.
				if parameter, ok, _ := unstructured.NestedString(o.Object, "spec", "paramRef", "name"); ok {
					parameters = append(parameters, parameter)
				}
			}
		}
		if !slices.Equal(namespaces, parameters) || len(parameters) > 1 || len(parameters) == 1 && parameters[0] != apifence.NamespaceFor(lease) {
			t.Errorf("%s: Namespaces %q, parameters %q", name, namespaces, parameters)
		}
		fenced += len(parameters)
	}
	if fenced < 5 {
		t.Errorf("%d installations have the fence: the test does not see them", fenced)
	}
}
