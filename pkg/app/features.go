// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"

	clientfeatures "k8s.io/client-go/features"
	"k8s.io/component-base/featuregate"
	logsapi "k8s.io/component-base/logs/api/v1"
)

// newFeatureGate returns a gate with the features of client-go and of logging. The manager has no
// features of its own yet.
func newFeatureGate() (featuregate.MutableVersionedFeatureGate, error) {
	gate := featuregate.NewFeatureGate()
	if err := logsapi.AddFeatureGates(gate); err != nil {
		return nil, fmt.Errorf("feature gates of logging: %w", err)
	}
	if err := clientfeatures.AddFeaturesToExistingFeatureGates(clientGoFeatures{gate}); err != nil {
		return nil, fmt.Errorf("feature gates of client-go: %w", err)
	}
	return gate, nil
}

// clientGoFeatures adapts the gate for client-go, which may not import component-base.
type clientGoFeatures struct {
	gate featuregate.MutableVersionedFeatureGate
}

func (c clientGoFeatures) Enabled(key clientfeatures.Feature) bool {
	return c.gate.Enabled(featuregate.Feature(key))
}

func (c clientGoFeatures) Add(in map[clientfeatures.Feature]clientfeatures.FeatureSpec) error {
	out := make(map[featuregate.Feature]featuregate.FeatureSpec, len(in))
	for name, spec := range in {
		converted := featuregate.FeatureSpec{Default: spec.Default, LockToDefault: spec.LockToDefault}
		switch spec.PreRelease {
		case clientfeatures.Alpha:
			converted.PreRelease = featuregate.Alpha
		case clientfeatures.Beta:
			converted.PreRelease = featuregate.Beta
		case clientfeatures.Deprecated:
			converted.PreRelease = featuregate.Deprecated
		default:
			converted.PreRelease = featuregate.GA
		}
		out[featuregate.Feature(name)] = converted
	}
	return c.gate.Add(out)
}
