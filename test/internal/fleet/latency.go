// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Latency measures how long a manager takes while other things happen.
type Latency struct {
	fleet     *Fleet
	ctx       context.Context
	t         testing.TB
	namespace string
	value     int // of the last change
}

// NewLatency returns a measurement.
func (f *Fleet) NewLatency(ctx context.Context, t testing.TB) *Latency {
	t.Helper()
	l := &Latency{fleet: f, ctx: ctx, t: t, namespace: f.NewNamespace(ctx, t, nil)}
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "direct"}}
	if _, err := f.Admin.CoreV1().ConfigMaps(l.namespace).Create(ctx, cm, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return l
}

// Median makes 11 changes and returns the median of the times until each is done. It logs it beside the
// time that the API server takes meanwhile for what nobody can save: a change, and its result, each
// written and read.
func (l *Latency) Median(situation string, change func(value string), done func(value string) bool) time.Duration {
	l.t.Helper()
	var took, direct []time.Duration
	for range 11 {
		l.value++
		value := fmt.Sprint(l.value)
		begin := time.Now()
		change(value)
		for !done(value) {
			if time.Since(begin) > Patience {
				l.t.Fatalf("%s: not done within %v", situation, Patience)
			}
		}
		took = append(took, time.Since(begin))
		begin = time.Now()
		for _, written := range []string{"the change", "its result"} {
			l.writeAndRead(value + written)
		}
		direct = append(direct, time.Since(begin))
	}
	slices.Sort(took)
	slices.Sort(direct)
	median := took[len(took)/2]
	l.t.Logf("%s: median %v, most %v; the API server alone %v, most %v: ratio %.1f", situation, median.Round(time.Millisecond), took[len(took)-1].Round(time.Millisecond),
		direct[len(direct)/2].Round(time.Millisecond), direct[len(direct)-1].Round(time.Millisecond), float64(median)/float64(direct[len(direct)/2]))
	return median
}

// writeAndRead writes and reads.
func (l *Latency) writeAndRead(value string) {
	l.t.Helper()
	configMaps := l.fleet.Admin.CoreV1().ConfigMaps(l.namespace)
	if _, err := configMaps.Patch(l.ctx, "direct", types.MergePatchType, []byte(`{"data":{"k":"`+value+`"}}`), metav1.PatchOptions{}); err != nil {
		l.t.Fatal(err)
	}
	if _, err := configMaps.Get(l.ctx, "direct", metav1.GetOptions{}); err != nil {
		l.t.Fatal(err)
	}
}
