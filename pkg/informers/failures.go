// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"cmp"
	"errors"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// failure is a series of failed requests with one verb.
type failure struct {
	verb        string
	err         error
	count       int64
	since, last time.Time
	refused     time.Time // since when isRefusal has held for every failure; zero after any other
	settled     bool      // refusals have lasted refusedAfter; other failures do not end that, a success does
}

// isDenied reports whether the server does not let the process do this: 401 or 403.
func isDenied(err error) bool {
	return apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err)
}

// isRefusal reports whether the server answers, and does not list: 403 or 404.
func isRefusal(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsNotFound(err)
}

// reasonOf returns why a request failed, without the error's own text, which is in the log and in
// /debug/informers and may name another port each time. An answer that is not an API server's gives no reason
// either.
func reasonOf(err error) string {
	return cmp.Or(string(apierrors.ReasonForError(err)), "no usable answer")
}

// causeOf returns what one failure has in common with the next of its kind: its reason or, without one, the
// text of the innermost error, since the outer errors name another port each time.
func causeOf(err error) string {
	if reason := apierrors.ReasonForError(err); reason != metav1.StatusReasonUnknown {
		return string(reason)
	}
	for inner := errors.Unwrap(err); inner != nil; inner = errors.Unwrap(err) {
		err = inner
	}
	return err.Error()
}
