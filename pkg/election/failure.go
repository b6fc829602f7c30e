// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"errors"
	"net/http"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

// failureOf classifies the error of a request.
func failureOf(err error) protocol.Failure {
	if err == nil {
		return protocol.Failure{}
	}
	f := protocol.Failure{Kind: protocol.FailUnanswered}
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok {
		f.After = time.Duration(seconds) * time.Second
	}
	var status apierrors.APIStatus
	switch {
	case !errors.As(err, &status):
	case apierrors.IsConflict(err), apierrors.IsAlreadyExists(err), apierrors.IsNotFound(err) && !isNamespaceMissing(err):
		f.Kind = protocol.FailConflict
	case apierrors.IsUnauthorized(err):
		f.Kind = protocol.FailUnauthorized
	case status.Status().Code/100 == http.StatusBadRequest/100:
		f.Kind = protocol.FailRefused
	}
	return f
}

func isNamespaceMissing(err error) bool {
	var status apierrors.APIStatus
	return apierrors.IsNotFound(err) && errors.As(err, &status) &&
		status.Status().Details != nil && status.Status().Details.Kind == "namespaces"
}
