// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/pager"
	"k8s.io/utils/clock"
)

const (
	// pageSize limits how many full objects are in memory at once when a list cannot be streamed.
	pageSize = 250
	// absentRetry is the time after which an optional resource that the server does not have is
	// looked for again.
	absentRetry = 30 * time.Second
	// streamPatience is how long a streamed list may pause before the list is requested in pages
	// instead. The bookmark that ends the stream may have been lost, and the reflector would wait
	// for it until the watch times out.
	streamPatience = 30 * time.Second
	// watchPatience is how long a watch may show nothing before it is opened anew. The API server sends
	// a bookmark each minute, so the connection is dead.
	watchPatience = 3 * time.Minute
	// answerPatience is how long a list may take, which kube-apiserver ends after 60 s, and how long the
	// response to a watch may take to begin. Over HTTP/1.1, nothing else ends a request on a connection
	// that is dead before the kernel gives up, after a quarter of an hour.
	answerPatience = 70 * time.Second
	// streamTries is how many requests for a streamed list may get no answer.
	streamTries = 4
)

// reducingListWatch stands between the client and client-go's reflector. It reduces objects,
// records what comes through, and returns an empty list for an optional resource that is missing.
// It implements cache.ListerWatcherWithContext.
type reducingListWatch struct {
	reducer
	// scopes has one element for all namespaces, or one for each of --namespaces.
	scopes []*scope
	state  *state
	clock  clock.WithDelayedExecution
	// reduced is called with every object that goes to the cache; may be nil.
	reduced func(runtime.Object)
	// inCache reports whether the cache has an object with that key.
	inCache func(key string) bool
	wg      *sync.WaitGroup
	current atomic.Pointer[reducingWatch]
	// again is set from relist until the next list begins.
	again atomic.Bool
}

// relist ends the watch, or the one that is being opened, in such a way that the reflector lists.
func (l *reducingListWatch) relist() {
	l.again.Store(true)
	if w := l.current.Load(); w != nil {
		w.interrupt()
	}
}

func (l *reducingListWatch) List(opts metav1.ListOptions) (runtime.Object, error) {
	return l.ListWithContext(context.Background(), opts)
}

func (l *reducingListWatch) Watch(opts metav1.ListOptions) (watch.Interface, error) {
	return l.WatchWithContext(context.Background(), opts)
}

// IsWatchListSemanticsUnSupported reports whether the reflector must not stream lists. It must not
// with several namespaces, since each of the streams would end on its own.
func (l *reducingListWatch) IsWatchListSemanticsUnSupported() bool { return len(l.scopes) > 1 }

// ListWithContext returns the whole list, reduced page by page. It sets a limit of its own. With
// the reflector's options, a server that cannot stream would return everything in one response:
// resourceVersion "0" makes it ignore the limit, and a relist has no limit.
func (l *reducingListWatch) ListWithContext(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	l.again.Store(false)
	opts.FieldSelector = l.plan.fieldSelector
	opts.Limit = 0
	switch opts.ResourceVersion {
	case "", "0":
		opts.ResourceVersion = ""
	default:
		opts.ResourceVersionMatch = metav1.ResourceVersionMatchNotOlderThan
	}
	list := &metainternalversion.List{}
	for _, s := range l.scopes {
		err := l.listScope(ctx, s, opts, list)
		if err != nil && l.plan.optional && apierrors.IsNotFound(err) {
			l.state.listedAbsent(ctx)
			return &metainternalversion.List{}, nil
		}
		if err != nil {
			if ctx.Err() == nil {
				l.state.failed("list", err)
			}
			return nil, err
		}
	}
	l.state.listed(ctx, list.ResourceVersion, len(list.Items))
	return list, nil
}

// listScope appends the objects of one scope to list.
func (l *reducingListWatch) listScope(ctx context.Context, s *scope, opts metav1.ListOptions, list *metainternalversion.List) error {
	pages := pager.New(func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
		return l.page(ctx, s, opts)
	})
	pages.PageSize = pageSize
	pages.FullListIfExpired = false // the reflector lists again, in pages
	all, _, err := pages.List(ctx, opts)
	if err != nil {
		return err
	}
	m, err := meta.ListAccessor(all)
	if err != nil {
		return fmt.Errorf("list %s: %w", resourceName(l.plan.resource), err)
	}
	list.ResourceVersion = m.GetResourceVersion()
	s.advance(list.ResourceVersion)
	return meta.EachListItem(all, func(obj runtime.Object) error {
		list.Items = append(list.Items, obj)
		return nil
	})
}

func (l *reducingListWatch) page(ctx context.Context, s *scope, opts metav1.ListOptions) (runtime.Object, error) {
	full, err := s.listInTime(ctx, opts)
	if err != nil {
		return nil, err
	}
	m, err := meta.ListAccessor(full)
	if err != nil {
		return nil, err
	}
	page := &metainternalversion.List{ListMeta: metav1.ListMeta{
		ResourceVersion: m.GetResourceVersion(),
		Continue:        m.GetContinue(),
	}}
	// WithAlloc copies each item. Otherwise an object that is kept would keep the array of the
	// whole page.
	err = meta.EachListItemWithAlloc(full, func(obj runtime.Object) error {
		if l.unwanted(obj) {
			return nil
		}
		reduced, err := l.reduce(obj)
		if err != nil {
			return err
		}
		page.Items = append(page.Items, reduced)
		return nil
	})
	return page, err
}

func (l *reducingListWatch) reduce(obj runtime.Object) (runtime.Object, error) {
	reduced, err := l.reducer.reduce(obj)
	if err == nil && l.reduced != nil {
		l.reduced(reduced)
	}
	return reduced, err
}

// WatchWithContext opens a watch, or a list that is streamed as a watch.
func (l *reducingListWatch) WatchWithContext(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	opts.FieldSelector = l.plan.fieldSelector
	streaming := opts.SendInitialEvents != nil && *opts.SendInitialEvents
	if streaming {
		l.again.Store(false)
	}
	w, err := l.open(ctx, opts, streaming)
	if err != nil {
		return nil, err
	}
	if w == nil {
		idle := &idleWatch{timer: l.clock.NewTimer(absentRetry), result: make(chan watch.Event), done: make(chan struct{})}
		l.wg.Go(idle.run)
		return idle, nil
	}
	appeared := l.state.isAbsent() && !streaming
	l.state.watching(ctx, streaming)
	if appeared {
		// A watch from no version sends what exists in no order, so it could not be resumed.
		w.stop()
		return nil, &apierrors.StatusError{ErrStatus: errAppeared}
	}
	out := &reducingWatch{from: w, l: l, result: make(chan watch.Event), done: make(chan struct{}), streaming: streaming}
	l.current.Store(out)
	if l.again.Load() {
		out.interrupt() // relist saw the watch before
	}
	l.wg.Go(out.run)
	return out, nil
}

// open opens the watch. It returns nil, nil if the resource is absent and has already been listed
// as empty. When the server does not answer, or refuses a streamed list for the moment, open waits and
// tries again itself: the reflector would list anew, or sleep for up to a minute without watching ctx,
// and delay Shutdown. A streamed list that often gets no answer is left to the reflector, which then
// lists in pages.
func (l *reducingListWatch) open(ctx context.Context, opts metav1.ListOptions, streaming bool) (stream, error) {
	backoff := wait.Backoff{Duration: 800 * time.Millisecond, Cap: 30 * time.Second, Steps: 100, Factor: 2, Jitter: 1}
	for try := 1; ; try++ {
		w, err := l.watchScopes(ctx, opts)
		if err == nil {
			return w, nil
		}
		if ctx.Err() != nil {
			return nil, err
		}
		if apierrors.IsNotFound(err) && l.state.isAbsent() && !streaming {
			return nil, nil
		}
		l.state.failed("watch", err)
		refused := streaming && (apierrors.IsTooManyRequests(err) || utilnet.IsConnectionRefused(err))
		unanswered := errors.Is(err, errNoAnswer) && (!streaming || try < streamTries)
		if !refused && !unanswered {
			return nil, err
		}
		l.state.logFailure(ctx, err)
		timer := l.clock.NewTimer(backoff.Step())
		select {
		case <-timer.C():
		case <-ctx.Done():
			timer.Stop()
			return nil, ctx.Err()
		}
	}
}
