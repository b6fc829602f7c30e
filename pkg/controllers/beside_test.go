// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllers

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/component-base/metrics"
)

func TestBeside(t *testing.T) {
	for name, test := range map[string]struct {
		beside func(ctx context.Context, enqueue func(...string)) error
		keys   string
		err    string // of Run
	}{
		"its keys are reconciled until the context ends": {
			beside: func(ctx context.Context, enqueue func(...string)) error {
				enqueue("a")
				<-time.After(time.Second)
				enqueue("b")
				<-ctx.Done()
				return nil
			}, keys: "a b",
		},
		"it may return the error of its context": {
			beside: func(ctx context.Context, _ func(...string)) error { <-ctx.Done(); return ctx.Err() },
		},
		"its error ends Run": {
			beside: func(context.Context, func(...string)) error { return errors.New("no more") }, err: "no more",
		},
		"Run ends with it": {
			beside: func(context.Context, func(...string)) error { return nil }, err: "what runs beside the workers returned before its context ended",
		},
		"a panic is contained": {
			beside: func(context.Context, func(...string)) error { panic("secret") }, err: "panic: a value of type string",
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var keys []string
				var l *Loop[string]
				var err error
				l, err = NewLoop(Options{
					Name: "x", Metrics: NewMetrics(metrics.NewKubeRegistry()),
					Beside: func(ctx context.Context) error { return test.beside(ctx, l.Enqueue) },
				}, func(_ context.Context, key string) (time.Duration, error) { keys = append(keys, key); return 0, nil })
				if err != nil {
					t.Fatal(err)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				err = l.Run(ctx)
				if strings.Join(keys, " ") != test.keys || (err == nil) != (test.err == "") || err != nil && err.Error() != test.err {
					t.Errorf("reconciled %q, error %v; want %q, %q", keys, err, test.keys, test.err)
				}
				if l.Status().Phase != Stopped {
					t.Errorf("phase %s", l.Status().Phase)
				}
			})
		})
	}
}

func TestWhenWhatRunsBesideEndsTheQueueIsNotWorkedOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var l *Loop[string]
		var reconciles int
		l, err := NewLoop(Options{
			Name: "x", Metrics: NewMetrics(metrics.NewKubeRegistry()),
			Beside: func(context.Context) error {
				for i := range 100 {
					l.Enqueue(fmt.Sprint(i))
				}
				<-time.After(90 * time.Second)
				return errors.New("no more")
			},
		}, func(context.Context, string) (time.Duration, error) {
			reconciles++
			<-time.After(time.Minute)
			return 0, nil
		})
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		if err := l.Run(t.Context()); err == nil || err.Error() != "no more" {
			t.Errorf("Run returned %v", err)
		}
		if took := time.Since(began); took != 2*time.Minute || reconciles != 2 {
			t.Errorf("Run returned after %v and %d reconciles, want the one in flight to be the last", took, reconciles)
		}
	})
}
