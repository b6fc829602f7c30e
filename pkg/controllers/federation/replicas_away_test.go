// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

// TestReplicasLeaveAClusterThatIsAway begins with five replicas in each cluster.
func TestReplicasLeaveAClusterThatIsAway(t *testing.T) {
	// cutOff cuts c2 off for a time, and then lets it be there for two minutes.
	cutOff := func(f *fed, d time.Duration) {
		f.c2.Cut()
		f.Sleep(d - 10*time.Second)
		f.setAllReady(f.c1)
		f.Sleep(10 * time.Second)
		f.c2.Restore()
		f.Sleep(2 * time.Minute)
		f.setAllReady(f.c1, f.c2)
		f.Sleep(time.Second)
	}
	for name, tc := range map[string]func(f *fed){
		"for 30 s: nothing moves": func(f *fed) {
			cutOff(f, 30*time.Second)
			f.expectSpread("c1=5 c2=5")
			f.expectDeploymentWrites(f.c1)
			f.expectDeploymentWrites(f.c2)
			if n := countWrites(f.Host, spreadUpdate); n != 0 {
				f.t.Errorf("%d writes", n)
			}
		},
		"for 2 min: replicas move, and the Deployment is not deleted": func(f *fed) {
			cutOff(f, 2*time.Minute)
			f.expectDeploymentWrites(f.c1, "update deployments.apps shop/d")
			f.expectDeploymentWrites(f.c2, "update deployments.apps shop/d")
			f.expectSpread("c1=10 c2=0") // what runs stays
		},
		"for 2 min, with rebalance: replicas move there and back": func(f *fed) {
			f.Put(preference(f.t, deploymentTarget+"totalReplicas: 10, rebalance: true"))
			f.Sleep(10 * time.Second)
			cutOff(f, 2*time.Minute)
			f.expectSpread("c1=5 c2=5")
			if n := countWrites(f.c2, deploymentDelete); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			if n := countWrites(f.Host, spreadUpdate); n != 2 {
				f.t.Errorf("%d writes", n)
			}
		},
		"ten times in an hour for 30 s: nothing moves": func(f *fed) {
			for range 10 {
				cutOff(f, 30*time.Second)
				f.Sleep(200 * time.Second)
			}
			f.expectSpread("c1=5 c2=5")
			f.expectDeploymentWrites(f.c2)
		},
		"ten times in an hour for 2 min: nothing is deleted": func(f *fed) {
			f.Put(preference(f.t, deploymentTarget+"totalReplicas: 10, rebalance: true"))
			f.Sleep(10 * time.Second)
			for range 10 {
				cutOff(f, 2*time.Minute)
				f.Sleep(2 * time.Minute)
			}
			f.expectSpread("c1=5 c2=5")
			if n := countWrites(f.c2, deploymentDelete); n != 0 {
				f.t.Errorf("c2 lost its Deployment %d times", n)
			}
			if n := countWrites(f.Host, spreadUpdate); n != 20 {
				f.t.Errorf("%d writes", n)
			}
		},
		"replicas move unavailableDelay after it is not ready": func(f *fed) {
			f.c2.Cut()
			for range 60 {
				if strings.Contains(fmt.Sprint(f.get(f.Host, "KubeFedCluster", namespace, "c2").Object["status"]), "ClusterNotReachable") {
					break
				}
				f.Sleep(time.Second)
			}
			f.Sleep(58 * time.Second)
			f.expectSpread("c1=5 c2=5")
			f.Sleep(4 * time.Second)
			f.expectSpread("c1=10")
		},
		"the cluster is back, and the plan cannot be written yet": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.expectSpread("c1=10")
			f.OnWrite(func(r controllertest.Request) error {
				if strings.HasPrefix(r.String(), spreadUpdate) {
					return errors.New("no space left")
				}
				return nil
			})
			f.c2.Restore()
			f.Sleep(10 * time.Minute)
			f.expectDeploymentWrites(f.c2)
			f.expectStatus("FederatedDeployment", "d", "CheckClusters c1= c2=WaitingForRemoval")
			f.OnWrite(nil)
			f.Sleep(10 * time.Minute)
			if n := countWrites(f.c2, deploymentDelete); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			f.expectStatus("FederatedDeployment", "d", "c1= c2=")
		},
		"the cluster is back under a new leader": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.c2.Restore()
			f.Restart()
			f.Sleep(10 * time.Minute)
			if n := countWrites(f.c2, deploymentDelete); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			f.expectStatus("FederatedDeployment", "d", "c1= c2=")
		},
		"another is away when it is back": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.c1.Cut()
			f.Sleep(30 * time.Second)
			f.c2.Restore()
			f.Sleep(10 * time.Minute)
			if n := countWrites(f.c2, deploymentDelete); n != 0 {
				f.t.Error("c2 lost its Deployment")
			}
			f.expectSpread("c2=10")
		},
		"the preference goes while it is away: placement rules": func(f *fed) {
			f.c2.Cut()
			f.Sleep(2 * time.Minute)
			f.Delete(preference(f.t, "x: y"))
			f.c2.Restore()
			f.Sleep(time.Minute)
			f.expectDeploymentWrites(f.c2, deploymentDelete)
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFed(t)
				f.Put(federatedDeployment(t, "placement: {}"), preference(t, deploymentTarget+"totalReplicas: 10"))
				f.Sleep(settleTime)
				f.setAllReady(f.c1, f.c2)
				f.Sleep(settleTime)
				f.expectSpread("c1=5 c2=5")
				f.Writes()
				f.c1.Writes()
				f.c2.Writes()
				tc(f)
			})
		})
	}
}
