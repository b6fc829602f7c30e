// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
	"k8s.io/klog/v2"
)

// ConfigMapGetter is the part of a client for ConfigMaps that CheckLegacyLocks needs.
type ConfigMapGetter interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.ConfigMap, error)
}

// EndpointsGetter is the part of a client for Endpoints that CheckLegacyLocks needs.
type EndpointsGetter interface {
	Get(ctx context.Context, name string, opts metav1.GetOptions) (*corev1.Endpoints, error) //nolint:staticcheck // legacy locks are in Endpoints
}

// CheckLegacyLocks returns an error if a replica of this fleet leads through a lock from before
// Leases: an annotation of a ConfigMap or of Endpoints of the same name and namespace. Such a
// replica and one that leads through the Lease would not see each other. The clients are those of
// the Lease's namespace.
//
// An object passes if it does not exist, has no fresh record, or may not be read. The permission,
// get on these two objects, is needed during a migration only.
func CheckLegacyLocks(ctx context.Context, cfg Config, configMaps ConfigMapGetter, endpoints EndpointsGetter) error {
	if !cfg.LeaderElect {
		return nil
	}
	var objects []metav1.Object
	var errs []error
	configMap, err := configMaps.Get(ctx, cfg.ResourceName, metav1.GetOptions{})
	if err == nil {
		objects = append(objects, configMap)
	}
	errs = append(errs, ignoreAbsent(ctx, "configmaps", err))
	endpoint, err := endpoints.Get(ctx, cfg.ResourceName, metav1.GetOptions{})
	if err == nil {
		objects = append(objects, endpoint)
	}
	errs = append(errs, ignoreAbsent(ctx, "endpoints", err))
	for i, object := range objects {
		record, err := legacyRecord(object)
		switch {
		case err != nil:
			errs = append(errs, err)
		case isFresh(record, time.Now()):
			errs = append(errs, fmt.Errorf("--leader-elect-resource-lock: %q leads through the annotation %s of the %T %s/%s, "+
				"renewed at %s, which a replica that elects through leases does not see: two would lead at once; "+
				"stop the replicas that use it, or move them to a lock type with leases first, then start again",
				record.HolderIdentity, resourcelock.LeaderElectionRecordAnnotationKey, objects[i],
				object.GetNamespace(), object.GetName(), record.RenewTime.UTC().Format(time.RFC3339)))
		}
	}
	return errors.Join(errs...)
}

func ignoreAbsent(ctx context.Context, resource string, err error) error {
	switch {
	case err == nil, apierrors.IsNotFound(err):
		return nil
	case apierrors.IsForbidden(err):
		klog.FromContext(ctx).Info("Cannot check whether a replica leads through a legacy lock: permission denied", "resource", resource)
		return nil
	}
	return fmt.Errorf("check %s for a legacy lock: %w", resource, err)
}

// legacyRecord returns the leader that the annotation names, or an empty record.
func legacyRecord(object metav1.Object) (resourcelock.LeaderElectionRecord, error) {
	var record resourcelock.LeaderElectionRecord
	annotation, present := object.GetAnnotations()[resourcelock.LeaderElectionRecordAnnotationKey]
	if !present {
		return record, nil
	}
	if err := json.Unmarshal([]byte(annotation), &record); err != nil {
		return record, fmt.Errorf("the annotation %s of %T %s/%s: %w", resourcelock.LeaderElectionRecordAnnotationKey,
			object, object.GetNamespace(), object.GetName(), err)
	}
	return record, nil
}

// isFresh reports whether the holder may still lead. There is no time to observe the record, so the
// clocks are compared, with a tolerance of another lease duration.
func isFresh(record resourcelock.LeaderElectionRecord, now time.Time) bool {
	duration := time.Duration(record.LeaseDurationSeconds) * time.Second
	return record.HolderIdentity != "" && now.Before(record.RenewTime.Add(2*duration))
}
