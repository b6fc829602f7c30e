// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"context"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// rolloutClient is the dynamic client, so that no field is lost, with the methods of a typed one.
type rolloutClient struct{ dynamic.ResourceInterface }

func (c rolloutClient) Get(ctx context.Context, name string, opts metav1.GetOptions) (*unstructured.Unstructured, error) {
	return c.ResourceInterface.Get(ctx, name, opts)
}

// patchRollout reloads an Argo Rollout.
func (c *controller) patchRollout(ctx context.Context, k *kind, facts *policy.Facts, plan *policy.Plan, _ *entry) (reloadOutcome, error) {
	workload := facts.Workload
	patch, err := c.cfg.MergePatch(facts, plan, func() ([]any, error) {
		live, err := k.get(ctx, workload.ObjectName)
		if err != nil {
			return nil, err
		}
		if live.GetResourceVersion() != workload.Version {
			return nil, errOutdated(workload)
		}
		containers, _, err := unstructured.NestedSlice(live.(*unstructured.Unstructured).Object, "spec", "template", "spec", "containers")
		if err != nil {
			return nil, fmt.Errorf("containers of %s: %w", workload.QueueKey, err)
		}
		return containers, nil
	})
	if err != nil {
		return reloadOutcome{}, err
	}
	version, err := c.sendPatch(ctx, k, workload, k.mergeType, patch)
	return reloadOutcome{version: version}, err
}
