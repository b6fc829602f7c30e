// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

// workers is --config-reload-concurrent-syncs, and so the maximum number of writes in flight.
const workers = 4

// pauseScene pauses a leader for longer than its Lease. Its Deployments are in three groups:
//
//	underWay: the leader sent their writes before the pause; the next leader cannot reach these
//	queued:   change during the pause; only the former leader gets at these, when it wakes
//	done:     the next leader has rolled these before the former one wakes
type pauseScene struct {
	underWay, queued, done []int
	setup                  setup
	fence                  bool // in the API server
}

func newPauseScene(writesUnderWay, fence bool, s setup) pauseScene {
	p := pauseScene{queued: []int{workers, workers + 1, workers + 2}, done: []int{workers + 3}, setup: s, fence: fence}
	if writesUnderWay {
		p.underWay = []int{0, 1, 2, 3}
	}
	return p
}

// play returns the judgement and the number of the former leader's requests that the fence in the
// API server has refused.
func (p pauseScene) play(t *testing.T) (*judge.Judgement, int) {
	t.Helper()
	ctx := fleet.Context(t)
	if p.fence {
		waitForFence(ctx, t)
	} else {
		disableFence(t)
	}
	w := shared.NewWorkloads(ctx, t, workers+4)
	history := shared.NewRecorder(t.Context(), t, w)
	replicas := newReplicas(ctx, t, 2, p.setup)
	fleet.Eventually(ctx, t, func() error { return w.Settled(ctx) })
	former, err := replicas.waitForLeader(ctx)
	assert.NoError(t, err)
	next := replicas.others(former)[0]
	unreachable := next.proxy.Add(faultproxy.Rule{Match: matchWorkOn(p.underWay, p.queued), Status: http.StatusServiceUnavailable})

	gate := make(chan struct{})
	held := former.proxy.Add(faultproxy.Rule{Match: isWork, Hold: gate})
	p.changeConfigMaps(ctx, t, w, p.underWay)
	assert.NoError(t, held.WaitHits(ctx, len(p.underWay)))
	assert.NoError(t, former.life().Signal(syscall.SIGSTOP))
	if _, err := replicas.waitForLeader(ctx, former); err != nil {
		t.Fatal(err)
	}
	p.changeConfigMaps(ctx, t, w, p.queued)
	p.changeConfigMaps(ctx, t, w, p.done)
	fleet.Eventually(ctx, t, func() error { return w.Settled(ctx, p.done...) })

	held.Remove()
	close(gate)
	fleet.Eventually(ctx, t, func() error { return checkAnswered(former, w, len(p.underWay)) })
	assert.NoError(t, former.life().Signal(syscall.SIGCONT))
	if err := former.life().Wait(ctx); former.life().ExitCode() != 1 {
		t.Errorf("the former leader ended with %d (%v), want 1", former.life().ExitCode(), err)
	}
	unreachable.Remove()
	// Work that has failed often waits for its back-off. The next change does not.
	p.changeConfigMaps(ctx, t, w, p.underWay)
	p.changeConfigMaps(ctx, t, w, p.queued)
	fleet.Eventually(ctx, t, func() error { return w.Settled(ctx) })
	got, err := history.Judge()
	assert.NoError(t, err)
	for _, f := range got.Findings {
		t.Log(f)
	}
	return got, history.Refused()
}

func (p pauseScene) changeConfigMaps(ctx context.Context, t *testing.T, w *fleet.Workloads, indexes []int) {
	t.Helper()
	for _, i := range indexes {
		assert.NoError(t, w.Change(ctx, i))
	}
}

// matchWorkOn returns a matcher of the work on some of the Deployments.
func matchWorkOn(groups ...[]int) func(*http.Request) bool {
	var paths []string
	for _, group := range groups {
		for _, i := range group {
			paths = append(paths, "/deployments/"+fleet.DeploymentName(i))
		}
	}
	return func(r *http.Request) bool {
		return isWork(r) && slices.ContainsFunc(paths, func(p string) bool { return strings.HasSuffix(r.URL.Path, p) })
	}
}

// checkAnswered waits until the API server has responded to the requests that were held. They are the
// last that the former leader sent: those before got their responses before the pause.
func checkAnswered(r *replica, w *fleet.Workloads, n int) error {
	events, err := shared.AuditEvents()
	if err != nil {
		return err
	}
	got := map[string]int{}
	for _, e := range events {
		if cluster.AuditPod(e) == r.Pod && e.Verb == "patch" && e.Stage == auditv1.StageResponseComplete && e.ObjectRef.Namespace == w.Namespace {
			got[e.ObjectRef.Name]++
		}
	}
	answered := 0 // the first is for the initial state
	for _, times := range got {
		if times >= 2 {
			answered++
		}
	}
	if answered < n {
		return fmt.Errorf("%d of %d held requests have a response", answered, n)
	}
	return nil
}

func buildUnfenced(t *testing.T, elector string) setup {
	t.Helper()
	program, err := cluster.BuildProgram(t.Context(), "test/faults/unfenced", false)
	assert.NoError(t, err)
	return setup{program: program, args: []string{"--elector=" + elector}}
}

func TestPausedLeadersWritesUnderWayAreRefused(t *testing.T) {
	got, refused := newPauseScene(true, true, setup{}).play(t)
	if stale := got.Stale(); len(stale) > 0 {
		t.Errorf("%d stale writes", len(stale))
	}
	if refused == 0 {
		t.Error("the API server has refused none of the writes that were under way")
	}
}

func TestPausedLeaderWritesNothingStaleOnWaking(t *testing.T) {
	if got, _ := newPauseScene(false, true, setup{}).play(t); len(got.Stale()) > 0 {
		t.Errorf("%d stale writes", len(got.Stale()))
	}
}

func TestLongPausedLeaderWithoutTheFence(t *testing.T) {
	t.Run("what was under way gets through and nothing else", func(t *testing.T) {
		scene := newPauseScene(true, false, setup{})
		got, _ := scene.play(t)
		stale := got.Stale()
		for _, f := range stale {
			if !slices.ContainsFunc(scene.underWay, func(i int) bool { return f.Object == "deployments/"+fleet.DeploymentName(i) }) {
				t.Errorf("was not under way: %s", f)
			}
		}
		if len(stale) > len(scene.underWay) {
			t.Errorf("%d stale writes of %d that were under way", len(stale), len(scene.underWay))
		}
	})
	t.Run("nothing that it finds to do on waking gets through", func(t *testing.T) {
		if got, _ := newPauseScene(false, false, setup{}).play(t); len(got.Stale()) > 0 {
			t.Errorf("%d stale writes", len(got.Stale()))
		}
	})
	for _, elector := range []string{"ours", "client-go"} {
		t.Run("without the client's fence too, elector "+elector+", the judge sees stale writes", func(t *testing.T) {
			got, _ := newPauseScene(true, false, buildUnfenced(t, elector)).play(t)
			overlaps := slices.DeleteFunc(got.Stale(), func(f judge.Finding) bool { return f.Verdict != judge.Overlap })
			// Some of them may be written before the next leader's first write.
			if len(overlaps) == 0 {
				t.Error("the judge has seen no write that overlaps with those of the next leader: it is too weak")
			}
		})
	}
}
