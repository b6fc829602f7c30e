// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation

import (
	"strings"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// collectEvery is statusEvery if the status of the objects in clusters is collected.
const collectEvery = 5 * time.Second

// statusEvery returns how often the status of the federated object is written at most.
func (v *view) statusEvery() time.Duration {
	if v.collects {
		return collectEvery
	}
	return statusEvery
}

// collect gives the results of clusters the status of their objects, if it is collected.
func (c *controller) collect(v *view, results []policy.ClusterResult) {
	if !v.collects || v.deleting {
		return
	}
	statuses := map[string]policy.RemoteStatus{}
	for name, r := range c.ready() {
		if object, exists := r.objectOf(v.key); exists {
			statuses[name] = policy.ReadRemoteStatus(object.Digest(Name))
		}
	}
	if left := policy.SetRemoteStatuses(results, statuses); len(left) > 0 {
		c.warnOnce(v, policy.Problem{Reason: policy.StatusTooLarge, Text: "the status of these clusters is left out: " + strings.Join(left, ", ")})
	}
}
