// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/internal/errtree"
)

// IsNotLeading reports whether err is the refusal of a write because this replica does not lead, not any more
// or not yet: whether an error in err's tree has a method NotLeading() bool that returns true. The loop's
// metric counts such an error apart, and the log does not show it, unless it is joined with an error of
// another kind. A controller need not report it either.
func IsNotLeading(err error) bool { return errtree.Any(err, refusesWrite) }

// refusesWrite is IsNotLeading of err itself, without what it wraps or joins.
func refusesWrite(err error) bool {
	refused, ok := any(err).(interface{ NotLeading() bool })
	return ok && refused.NotLeading()
}

// IsOutcomeUnknown reports whether err is the error of a write that was in flight when the term of this
// replica ended. IsNotLeading reports such an error too. The test is whether an error in err's tree has a
// method OutcomeUnknown() bool that returns true.
func IsOutcomeUnknown(err error) bool {
	return errtree.Any(err, func(err error) bool {
		ended, ok := any(err).(interface{ OutcomeUnknown() bool })
		return ok && ended.OutcomeUnknown()
	})
}

// TerminalError returns an error with the text of err which says that it is not worth a retry, such as
// for an object that nobody can make sense of. The loop counts and logs it, and calls reconcile again
// at the object's next event, or after the duration that reconcile returned. Until then the status has the
// key among those that fail, also if the object is gone and the loop's watch leaves out deletions. If it is
// joined with other errors, all must be terminal. For a nil err it returns nil.
func TerminalError(err error) error {
	if err == nil {
		return nil
	}
	return &terminalError{err}
}

type terminalError struct{ error }

func (e *terminalError) Unwrap() error { return e.error }

// isTerminal and isDryRun are for errtree.Every, which unwraps.
func isTerminal(err error) bool {
	_, ok := any(err).(*terminalError)
	return ok || isDryRun(err)
}

func isDryRun(err error) bool { _, ok := any(err).(*DryRunError); return ok }

// DryRunError is the error of a controller's request that was not sent, because --dry-run is set and the
// request cannot be a dry run. It is terminal, see TerminalError. Test for it with errors.As.
type DryRunError struct {
	Method, Path string
	Reason       string
}

func (e *DryRunError) Error() string {
	return fmt.Sprintf("%s %s was not sent, --dry-run forbids it: %s", e.Method, e.Path, e.Reason)
}

// isConflict reports whether err is the API server's answer that an object has changed. A conflict of field
// managers is another answer, which a retry does not mend.
func isConflict(err error) bool {
	_, answer := any(err).(apierrors.APIStatus)
	return answer && apierrors.IsConflict(err) && !apierrors.HasStatusCause(err, metav1.CauseTypeFieldManagerConflict)
}

// retryAfter returns the longest Retry-After of err and of the errors that it wraps or joins, or 0.
func retryAfter(err error) (longest time.Duration) {
	if _, answer := any(err).(apierrors.APIStatus); answer {
		seconds, _ := apierrors.SuggestsClientDelay(err)
		longest = time.Duration(seconds) * time.Second
	}
	for _, part := range errtree.Parts(err) {
		longest = max(longest, retryAfter(part))
	}
	return longest
}

// IsNamespaceMissing reports whether a request was refused because its namespace does not exist.
// Admission may return the same code for other reasons.
func IsNamespaceMissing(err error) bool {
	var status apierrors.APIStatus
	if !apierrors.IsNotFound(err) || !errors.As(err, &status) {
		return false
	}
	details := status.Status().Details
	return details != nil && details.Kind == "namespaces"
}
