// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// Lag delays all watch events of one resource by the given time and keeps their order. Lists are
// not delayed, like consistent reads of a real API server.
func Lag(client *fake.Clientset, resource string, by time.Duration) {
	if by <= 0 {
		return
	}
	client.PrependWatchReactor(resource, func(action clienttesting.Action) (bool, watch.Interface, error) {
		a := action.(clienttesting.WatchActionImpl)
		in, err := client.Tracker().Watch(a.GetResource(), a.GetNamespace(), a.ListOptions)
		if err != nil {
			return true, nil, err
		}
		late := &lateWatch{Interface: in, out: make(chan watch.Event), stop: make(chan struct{})}
		go late.run(by)
		return true, late, nil
	})
}

// lateWatch delivers each event after the lag.
type lateWatch struct {
	watch.Interface
	out  chan watch.Event
	stop chan struct{}
}

func (w *lateWatch) ResultChan() <-chan watch.Event { return w.out }

// Stop ends the watch. It may be called only once, as reflectors do.
func (w *lateWatch) Stop() {
	close(w.stop)
	w.Interface.Stop()
}

func (w *lateWatch) run(by time.Duration) {
	defer close(w.out)
	type dated struct {
		watch.Event
		due time.Time
	}
	var pending []dated
	in := w.Interface.ResultChan()
	for in != nil || len(pending) > 0 {
		var next <-chan time.Time
		if len(pending) > 0 {
			next = time.After(time.Until(pending[0].due))
		}
		select {
		case <-w.stop:
			return
		case event, ok := <-in:
			if !ok {
				in = nil
				continue
			}
			pending = append(pending, dated{event, time.Now().Add(by)})
		case <-next:
			select {
			case w.out <- pending[0].Event:
				pending = pending[1:]
			case <-w.stop:
				return
			}
		}
	}
}
