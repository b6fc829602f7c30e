// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"time"

	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/internal/loopmetrics"
)

// minBackoff and maxBackoff are the defaults of LoopOptions. maxBackoff also limits the Retry-After of an
// answer, which may come from a webhook. A key is never given up: its object would stay wrong until something
// else changes it.
const (
	minBackoff = time.Second
	maxBackoff = 5 * time.Minute
)

// LoopOptions configures a [Loop]. The host fills in Name, Workers, Timeout, DrainTimeout, WaitFor and
// Metrics; a controller may set the others, and another Timeout, DrainTimeout or WaitFor.
type LoopOptions struct {
	// Name is the controller's name. It is the label controller of metrics, log and profiles.
	Name string
	// Loop is the name of the loop in a controller that has several. It is the label loop of metrics, log and
	// profiles.
	Loop string
	// Cluster is set for a loop that works in another cluster, see Cluster.LoopOptions. It is the label
	// cluster.
	Cluster string
	// Workers is the number of keys reconciled at once; default 1. A key is never with two workers at once. The
	// host sets what --NAME-concurrent-syncs says if the entry has Workers.
	Workers int
	// MinBackoff is the first back-off of a failing key, default 1 s. Each further one is twice as long, up to
	// MaxBackoff, default 5 min.
	MinBackoff, MaxBackoff time.Duration
	// Timeout, if set, is how long a reconcile may take. Then its context ends. The host sets it to
	// --controller-stuck-after; for another cluster, to at most 30 s. A reconcile that takes longer than
	// --controller-stuck-after fails the health check of its controller in any case.
	Timeout time.Duration
	// DrainTimeout, if set, is how long the reconciles in flight may take to end when Run is to end. Then
	// their contexts end. In a loop for another cluster it counts from the beginning of the longest
	// reconcile: a cluster that has not answered for that long gets no more time. --shutdown-timeout applies
	// in any case. The host sets 2 s less than that, but at least half of it; for another cluster, 2 s.
	DrainTimeout time.Duration
	// WaitFor are caches that reconciles read. Run waits until they have synced, as it does for those of
	// watches. It takes no key of a namespace of which one of them knows nothing. The host sets what the entry
	// has in Needs; in another cluster, nothing. A controller may add what Entry.New follows, or leave out what
	// its loop does not read.
	WaitFor []Awaited
	// Metrics counts for /metrics. A loop without it, in a test of its author's, counts for itself.
	Metrics *loopmetrics.Metrics
	// Background, if set, runs beside the workers until ctx ends, for instance to call Enqueue. If it returns
	// earlier, Run ends with its error. An error after ctx has ended does not count.
	Background func(ctx context.Context) error
}

// String returns the name for people, and the label name of the queue's metrics: CONTROLLER/LOOP@CLUSTER,
// without what is empty.
func (o LoopOptions) String() string { return o.labels().String() }

// backoff returns the back-off of a key that has failed before, this often in a row.
func (o LoopOptions) backoff(failures int) time.Duration {
	return time.Duration(min(float64(o.MinBackoff)*math.Pow(2, float64(failures)), float64(o.MaxBackoff)))
}

// labels returns the labels of the loop's metrics.
func (o LoopOptions) labels() loopmetrics.Loop {
	return loopmetrics.Loop{Controller: o.Name, Name: o.Loop, Cluster: o.Cluster}
}

// withDefaults returns the options with the defaults filled in, or an error that names what is wrong.
func (o LoopOptions) withDefaults() (LoopOptions, error) {
	o.Workers = max(o.Workers, 1)
	o.MinBackoff, o.MaxBackoff = cmp.Or(o.MinBackoff, minBackoff), cmp.Or(o.MaxBackoff, maxBackoff)
	switch {
	case o.Name == "":
		return o, errors.New("loop without LoopOptions.Name")
	case min(o.DrainTimeout, o.Timeout, o.MinBackoff) < 0:
		return o, fmt.Errorf("loop %s: no duration of LoopOptions may be negative", o)
	case o.MaxBackoff < o.MinBackoff:
		return o, fmt.Errorf("loop %s: LoopOptions.MaxBackoff %s must be at least MinBackoff, which is %s",
			o, o.MaxBackoff, o.MinBackoff)
	}
	if o.Metrics == nil {
		o.Metrics = loopmetrics.New(metrics.NewKubeRegistry())
	}
	return o, nil
}
