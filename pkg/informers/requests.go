// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"context"
	"errors"
	"reflect"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"
)

// The requests that the reflector makes through a feed.

// pageSize limits how many full objects are in memory at once when a list cannot be streamed.
const pageSize = 250

// pageTimeout limits a request for a page, wholeTimeout one for a list as a whole, and overtime how long a
// watch goes on after the time that it asked for. An API server answers sooner; a proxy before it may keep a
// connection open that leads nowhere.
const (
	pageTimeout  = 2 * time.Minute
	wholeTimeout = 10 * time.Minute
	overtime     = 30 * time.Second
)

// ListWithContext returns the whole list, reduced page by page. With the reflector's own options, an
// API server that cannot stream would return all objects in one response.
func (f *feed) ListWithContext(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	err := f.attempt.throttled
	f.attempt.throttled = nil
	var list runtime.Object
	if err == nil { // otherwise the server is too busy for pages as well, and is asked later
		list, err = f.list(ctx, opts)
	}
	if err != nil && ctx.Err() == nil {
		f.state.recordFailure("list", err)
	}
	return list, err
}

func (f *feed) list(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
	f.setSelectors(&opts)
	opts.Limit, opts.Continue, opts.ResourceVersion, opts.ResourceVersionMatch = pageSize, "", "", ""
	list := &metainternalversion.List{}
	for {
		timeout := pageTimeout
		if opts.Limit == 0 {
			timeout = wholeTimeout
		}
		pageCtx, end := context.WithTimeout(ctx, timeout)
		page, err := f.source.list(pageCtx, opts)
		end()
		if apierrors.IsResourceExpired(err) && opts.Continue != "" {
			// The list took longer than etcd keeps a version, as another list in pages would, so it is read as a
			// whole.
			list.Items, opts.Limit, opts.Continue = nil, 0, ""
			continue
		}
		if err != nil {
			return nil, err
		}
		m, err := meta.ListAccessor(page)
		if err != nil {
			return nil, err
		}
		// WithAlloc copies each item. Otherwise an object that is kept would keep the whole page.
		if err := meta.EachListItemWithAlloc(page, func(obj runtime.Object) error {
			reduced, err := f.informer.reduce(obj)
			if err == nil && reduced != any(unwanted) {
				list.Items = append(list.Items, reduced.(runtime.Object))
			}
			return err
		}); err != nil {
			return nil, err
		}
		list.ResourceVersion = m.GetResourceVersion()
		if opts.Continue = m.GetContinue(); opts.Continue == "" {
			return list, nil
		}
	}
}

func (f *feed) setSelectors(opts *metav1.ListOptions) {
	opts.LabelSelector, opts.FieldSelector = f.informer.plan.labelSelector, f.informer.plan.fieldSelector
}

// errNoAnswer is the error of a watch that did not begin.
var errNoAnswer = errors.New("the connection broke or timed out before the server responded")

// WatchWithContext opens a watch, or a list that is streamed as a watch.
func (f *feed) WatchWithContext(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	f.setSelectors(&opts)
	streamed := opts.SendInitialEvents != nil
	if f.attempt.isBrief(time.Now(), streamed) {
		return nil, errBrief
	}
	f.attempt.endWatch()
	timeout := time.Duration(ptr.Deref(opts.TimeoutSeconds, 600))*time.Second + overtime
	watchCtx, cancel := context.WithTimeout(ctx, timeout)
	f.attempt.cancelWatch = cancel
	w, err := f.source.watch(watchCtx, opts)
	if err == nil && reflect.TypeOf(w) == reflect.TypeOf(watch.NewEmptyWatch()) {
		err = errNoAnswer // client-go returns it if the connection broke ten times
	}
	if err == nil {
		f.state.recordWatch()
		f.attempt.watched(time.Now(), streamed, f.state.recordLasting)
		return w, nil
	}
	if ctx.Err() != nil {
		return nil, err
	}
	busy := apierrors.IsTooManyRequests(err)
	switch {
	case streamed && busy:
		f.attempt.throttled = err
	case streamed && apierrors.IsInvalid(err): // a server that does not stream lists is asked for pages
	default:
		f.state.recordFailure("watch", err)
	}
	switch {
	case streamed:
		err = errors.New(err.Error()) // an error of no type, after which the reflector asks for pages
	case busy || utilnet.IsConnectionRefused(err):
		f.state.logFailure(err) // the reflector does not return to run
	}
	return nil, err
}
