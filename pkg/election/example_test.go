// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election_test

import (
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/quartermaster-dev/quartermaster/pkg/election"
)

// A process that leads or stands by, and writes only while it leads.
func Example() {
	run := func(ctx context.Context, pod string) error {
		config, err := rest.InClusterConfig()
		if err != nil {
			return err
		}
		elector, err := kubernetes.NewForConfig(election.ClientConfig(config))
		if err != nil {
			return err
		}
		cfg := election.NewConfig(types.NamespacedName{Namespace: "shop", Name: "restocker"})
		lock, err := election.NewLock(cfg, election.Candidate{
			Identity: election.NewIdentity(pod),
			Client:   elector.CoordinationV1().Leases(cfg.Lease().Namespace),
		})
		if err != nil {
			return err
		}
		config.Wrap(lock.Fence)
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return err
		}
		return lock.Run(ctx, func(ctx context.Context) error {
			stock := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "stock"}}
			_, err := client.CoreV1().ConfigMaps("shop").Create(ctx, stock, metav1.CreateOptions{})
			return err
		})
	}
	err := run(context.Background(), "restocker-0")
	fmt.Println(errors.Is(err, rest.ErrNotInCluster)) // a test is no Pod
	// Output: true
}
