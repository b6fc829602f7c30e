// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// attempt is the state of one call of the reflector's ListAndWatchWithContext, which makes a list and then
// watches. The feed steers it, since left alone it asks a busy server for a list in pages too, asks without
// end for a list that breaks in the middle, watches again at once after a watch that broke at once, and
// waits without ctx. WatchWithContext tells the reflector by its error what to do next:
//
//	asked for          error                      the reflector
//	a streamed list    429, connection refused    waits without ctx, and asks again: it never gets these
//	a streamed list    410                        asks again at once: it never gets this
//	a streamed list    any other, errBrief        asks ListWithContext for pages
//	                   429 in its events          waits without ctx, and asks again
//	a watch            429, connection refused    waits, and asks again
//	a watch            any other, errBrief        returns the error to run
type attempt struct {
	listed  time.Time // when the list was complete; zero before
	opened  time.Time // when the last watch or streamed list began; zero after a complete list
	streams int       // how many streamed lists have begun
	// throttled is the error of a streamed list for which the API server was too busy, for ListWithContext.
	throttled error

	cancelWatch context.CancelFunc // ends the context of the last watch; nil before the first
	lasting     *time.Timer        // ends when the last watch has worked for workingAfter; nil before the first
	freeSlot    func()             // gives the slot of the list in listSlots back; nil without one. A second call does nothing
}

var (
	// errBrief is for an attempt that must not go on as it is.
	errBrief = errors.New("the last watch ended within a second, or the list cannot be streamed")
	// errCut is for a watch that was accepted and does not work, as behind a proxy that cuts streams.
	errCut = fmt.Errorf("the watch was accepted, and ended within %s of the list", workingAfter)
)

// workingAfter is how long a watch must last to count as one that works.
const workingAfter = 5 * time.Second

// maxStreams is how many streamed lists may break, as behind a proxy that cuts long responses, before the
// list is read in pages. The reflector would stream it again for ever.
const maxStreams = 2

// isBrief reports whether the request must not be made now: the last one lasted less than a second, after
// which the reflector does not wait if there was an event, or maxStreams lists have broken.
func (a *attempt) isBrief(now time.Time, streamed bool) bool {
	return now.Sub(a.opened) < time.Second || streamed && a.streams == maxStreams
}

// watched notes that a watch or a streamed list has begun. works is called when the watch, or the one that
// goes on from the list, has lasted.
func (a *attempt) watched(now time.Time, streamed bool, works func()) {
	a.opened = now
	a.lasting = time.AfterFunc(workingAfter, works)
	if streamed {
		a.streams++
		a.lasting.Stop() // until complete
	}
}

// isCut reports whether the watch, which has ended, never worked after the list. It does not concern a watch
// that cannot be resumed later: a list follows that.
func (a *attempt) isCut(now time.Time) bool {
	return !a.listed.IsZero() && now.Sub(a.listed) < workingAfter
}

// complete notes that the list is complete.
func (a *attempt) complete(now time.Time) {
	a.listed, a.opened = now, time.Time{}
	if a.lasting != nil {
		a.lasting.Reset(workingAfter)
	}
	a.endList()
}

// endList lets the list of another resource begin, since this one has been read or has failed.
func (a *attempt) endList() {
	if a.freeSlot != nil {
		a.freeSlot()
	}
}

// endWatch releases what the last watch holds; the reflector has stopped it.
func (a *attempt) endWatch() {
	if a.cancelWatch != nil {
		a.cancelWatch()
	}
	if a.lasting != nil {
		a.lasting.Stop()
	}
}
