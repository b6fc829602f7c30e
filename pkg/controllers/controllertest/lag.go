// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// Lag makes the events of the watches of one resource arrive late, in order.
// Lists are not late, as with a real API server that is read quorum.
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

// lateWatch hands on each event when it is as old as the lag.
type lateWatch struct {
	watch.Interface
	out  chan watch.Event
	stop chan struct{}
}

func (w *lateWatch) ResultChan() <-chan watch.Event { return w.out }

// Stop ends the watch; it may be called once, as by a reflector.
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
