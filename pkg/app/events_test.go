// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// slowSink takes two seconds for each Event, or fails at once.
type slowSink struct {
	err error

	mu       sync.Mutex
	received []string
}

func (s *slowSink) Create(event *corev1.Event) (*corev1.Event, error) {
	if s.err != nil {
		return nil, s.err
	}
	<-time.After(2 * time.Second)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.received = append(s.received, event.Reason)
	return event, nil
}

func (s *slowSink) Update(event *corev1.Event) (*corev1.Event, error)          { return event, nil }
func (s *slowSink) Patch(event *corev1.Event, _ []byte) (*corev1.Event, error) { return event, nil }

func TestEventsAreSentBeforeTheEnd(t *testing.T) {
	for name, tc := range map[string]struct {
		sink  *slowSink
		count int
		want  []string
		takes time.Duration
	}{
		"without any Event nothing is waited for":      {&slowSink{}, 0, nil, 0},
		"what was recorded is sent":                    {&slowSink{}, 1, []string{"R0"}, 2 * time.Second},
		"what takes too long is given up":              {&slowSink{}, 9, []string{"R0"}, eventsFlushTimeout},
		"an API server that is away is not waited for": {&slowSink{err: errors.New("away")}, 2, nil, eventsFlushTimeout},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				scheme, err := NewScheme(nil)
				if err != nil {
					t.Fatal(err)
				}
				e := recordTo(t.Context(), tc.sink, scheme)
				recorder := e.recorder("test")
				for i := range tc.count {
					recorder.Event(&corev1.ConfigMap{}, corev1.EventTypeNormal, fmt.Sprintf("R%d", i), "")
				}
				begin := time.Now()
				e.stop()
				if took := time.Since(begin); took != tc.takes {
					t.Errorf("the end took %s, want %s", took, tc.takes)
				}
				tc.sink.mu.Lock()
				if got := tc.sink.received; !slices.Equal(got, tc.want) {
					t.Errorf("sent %v, want %v", got, tc.want)
				}
				tc.sink.mu.Unlock()
				<-time.After(time.Minute) // until what was on its way has ended
			})
		})
	}
}
