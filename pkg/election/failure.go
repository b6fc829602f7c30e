// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
)

// failure says what follows from the error of a request.
type failure struct {
	kind  failureKind
	after time.Duration // how long the API server asks to wait
}

type failureKind int

const (
	failNone       failureKind = iota
	failConflict               // another version than the known one is current
	failRefused                // the request was not executed, and will be refused again
	failUnanswered             // it may have been executed, or the API server is in trouble
)

func failureOf(err error) failure {
	if err == nil {
		return failure{}
	}
	f := failure{kind: failUnanswered}
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
		f.after = time.Duration(seconds) * time.Second
	}
	var status apierrors.APIStatus
	switch {
	case !errors.As(err, &status):
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err) && !isNamespaceMissing(err):
		f.kind = failConflict
	case status.Status().Code/100 == http.StatusBadRequest/100:
		f.kind = failRefused
	}
	return f
}

func isNamespaceMissing(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) &&
		status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}

// explain returns what keeps this replica from a request that was refused.
func explain(verb string, lease types.NamespacedName, err error) error {
	switch {
	case isNamespaceMissing(err):
		return fmt.Errorf("namespace %s of the lease does not exist: %w", lease.Namespace, err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("this replica may not %s lease %s (leases in coordination.k8s.io): %w", verb, lease, err)
	case apierrors.IsUnauthorized(err):
		return fmt.Errorf("the API server does not accept the credentials of this replica: %w", err)
	}
	return fmt.Errorf("the API server refuses to %s lease %s: %w", verb, lease, err)
}

// failures counts the failures of one kind in a row.
type failures struct {
	kind failureKind
	n    int
}

func (c *failures) count(f failure) {
	if c.kind != f.kind {
		c.n = 0
	}
	c.kind = f.kind
	c.n++
}

// newJitter returns a source of random delays. Replicas have different ones.
func newJitter(name string) *rand.Rand {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(name)) // never fails
	return rand.New(rand.NewPCG(hash.Sum64(), 0))
}
