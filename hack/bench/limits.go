// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

const (
	// otherUser is unrelated to the manager. Priority and fairness puts it into another flow and
	// another priority level than a ServiceAccount of kube-system.
	otherUser = "bench-other-user"
	// otherPause is the time between two requests of the other user.
	otherPause = 20 * time.Millisecond
	// otherAlone is how long the other user is measured before a burst.
	otherAlone = 5 * time.Second
)

// limits measures large bursts of reloads with several limits of the manager's request rate, and
// how they affect another user of the API server.
func (b *bench) limits(ctx context.Context) error {
	if !b.opts.wants(ours) {
		return nil
	}
	other, err := b.otherUser(ctx)
	if err != nil {
		return err
	}
	for _, limit := range []struct {
		name string
		args []string
	}{
		{"50/100", []string{"--kube-api-qps=50", "--kube-api-burst=100"}},
		{"500/1000", []string{"--kube-api-qps=500", "--kube-api-burst=1000"}},
		{"no limit", []string{"--kube-api-qps=-1"}},
	} {
		s := managerSubject(b, ours+", "+limit.name, b.binaries.manager, append(limit.args, "--config-reload-quiet-period=0")...)
		if err := b.measureLimit(ctx, s, other); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return nil
}

// otherUser returns the client of a user that is unrelated to the manager.
func (b *bench) otherUser(ctx context.Context) (*kubernetes.Clientset, error) {
	_, err := b.admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: otherUser},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{Kind: rbacv1.UserKind, Name: otherUser}},
	}, metav1.CreateOptions{})
	if ignoreExists(err) != nil {
		return nil, err
	}
	config := b.c.AdminConfig()
	config.Impersonate = rest.ImpersonationConfig{UserName: otherUser}
	return kubernetes.NewForConfig(config)
}

func (b *bench) measureLimit(ctx context.Context, s subject, other *kubernetes.Clientset) (err error) {
	n := b.opts.reloads
	b.progress("%s: starting a leader and a standby, then %d Deployments", s.name, n)
	p, err := b.startPair(ctx, s)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the watch of Deployments, not that of the Lease
	w, err := b.createWorkloads(ctx, n)
	if err != nil {
		return err
	}
	var all burstFigures
	var before, during []float64
	for i := range b.opts.bursts {
		// Lets the buckets of the clients' rate limits fill up.
		if err := sleep(ctx, quiescence); err != nil {
			return err
		}
		stop := b.patchAsOther(ctx, other)
		if err := sleep(ctx, otherAlone); err != nil {
			return err
		}
		begin := time.Now()
		if err := b.oneBurst(ctx, p, w, n, &all); err != nil {
			return err
		}
		end := begin.Add(time.Duration(all.seconds[i] * float64(time.Second)))
		patches, err := stop()
		if err != nil {
			return err
		}
		for _, patch := range patches {
			switch {
			case patch.sent.Before(begin):
				before = append(before, milliseconds(patch.took))
			case patch.sent.Before(end):
				during = append(during, milliseconds(patch.took))
			}
		}
	}
	burst := fmt.Sprintf("limits/burst of %d ConfigMaps of %d Deployments, ", n, n)
	b.add(burst+"all patched", s.name, "s", all.seconds...)
	b.add(burst+"patches of a Deployment", s.name, "patches", all.patches...)
	b.add(burst+"API requests", s.name, "requests", all.requests...)
	b.add("limits/PATCH by another user, before the burst", s.name, "ms", before...)
	b.add("limits/PATCH by another user, during the burst", s.name, "ms", during...)
	return b.cleanWorkloads(ctx)
}

// sentPatch is one request of the other user.
type sentPatch struct {
	sent time.Time
	took time.Duration
}

// patchAsOther repeatedly patches a ConfigMap that no workload uses. stop ends that and returns the
// patches.
func (b *bench) patchAsOther(ctx context.Context, other *kubernetes.Clientset) (stop func() ([]sentPatch, error)) {
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	var all []sentPatch
	var failed error
	go func() {
		defer close(done)
		for {
			patch := fmt.Appendf(nil, `{"data":{"value":"%x"}}`, rand.Uint64())
			sent := time.Now()
			_, err := other.CoreV1().ConfigMaps(namespace).Patch(ctx, plain, types.MergePatchType, patch, metav1.PatchOptions{})
			if ctx.Err() != nil {
				return
			}
			if err != nil {
				failed = fmt.Errorf("a patch by another user: %w", err)
				return
			}
			all = append(all, sentPatch{sent, time.Since(sent)})
			if sleep(ctx, otherPause) != nil {
				return
			}
		}
	}()
	return func() ([]sentPatch, error) {
		cancel()
		<-done
		return all, failed
	}
}
