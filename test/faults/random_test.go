// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/faultproxy"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
	"github.com/quartermaster-dev/quartermaster/test/internal/judge"
)

var (
	flagKinds = flag.String("kinds", "", "a regular expression: only faults of matching names are injected")
	flagFence = flag.String("fence", "both", "the fences in force: both, client (the one in the API server is off; late writes are counted) or "+
		"none (in neither; there must be late writes)")
)

const (
	// changePeriod is how often a ConfigMap changes. A write is delayed by workDelay, so that there
	// are always some in flight.
	changePeriod = 30 * time.Millisecond
	workDelay    = 40 * time.Millisecond
)

// TestFaultsLetNobodyWriteWithoutLeading injects faults in a random order into three managers that always
// have work. After each fault, somebody must lead and all work must be done. In the whole run, nobody may
// have written without leading. FAULTS says how many faults, of which 25 are one of each kind, and SEED how
// they are chosen; 0 is another seed in each run.
func TestFaultsLetNobodyWriteWithoutLeading(t *testing.T) {
	seed := uint64(fleet.Setting(t, "SEED", 1))
	if seed == 0 {
		seed = rand.Uint64()
	}
	kindPattern, err := regexp.Compile(*flagKinds)
	assert.NoError(t, err)
	managers := setup{}
	if *flagFence == "both" {
		waitForFence(fleet.Context(t), t)
	} else {
		disableFence(t)
	}
	if *flagFence == "none" {
		managers = buildUnfenced(t, "ours")
	}
	c := newCampaign(t, seed, managers)
	c.recorder.Fenced = *flagFence == "both"
	kinds := deck{rand: c.rand, kinds: slices.DeleteFunc(slices.Clone(faults), func(f fault) bool { return !kindPattern.MatchString(f.name) })}
	if len(kinds.kinds) == 0 {
		t.Fatalf("no kind of fault matches -kinds=%s", *flagKinds)
	}
	for i := range fleet.Setting(t, "FAULTS", 6) {
		c.inject(i, kinds.draw())
		if t.Failed() {
			break
		}
	}
	c.logReport()
	if *flagFence == "none" && len(c.last.Stale()) == 0 {
		t.Error("without any fence there is no late write: the judge or the faults are too weak")
	}
}

// deck deals all faults in a random order, again and again.
type deck struct {
	rand  *rand.Rand
	kinds []fault
	cards []fault // left of the current round
}

func (d *deck) draw() fault {
	if len(d.cards) == 0 {
		d.cards = slices.Clone(d.kinds)
		d.rand.Shuffle(len(d.cards), func(i, j int) { d.cards[i], d.cards[j] = d.cards[j], d.cards[i] })
	}
	card := d.cards[0]
	d.cards = d.cards[1:]
	return card
}

// campaign is one run of TestFaultsLetNobodyWriteWithoutLeading.
type campaign struct {
	t         *testing.T
	seed      uint64
	rand      *rand.Rand
	workloads *fleet.Workloads
	replicas  replicas
	recorder  *fleet.Recorder
	last      *judge.Judgement
	reported  map[uint64]judge.Verdict // findings that were reported
	kinds     map[string]*tally
}

// tally holds the results for one kind of fault.
type tally struct {
	injected  int
	gaps      []time.Duration // from the last version of the Lease before to each acquisition
	recovered []time.Duration // from the fault's end until all work was done
	findings  int
}

func newCampaign(t *testing.T, seed uint64, managers setup) *campaign {
	t.Helper()
	ctx := fleet.Context(t)
	c := &campaign{t: t, seed: seed, rand: rand.New(rand.NewPCG(seed, 0)), kinds: map[string]*tally{}, last: &judge.Judgement{}, reported: map[uint64]judge.Verdict{}}
	c.workloads = shared.NewWorkloads(ctx, t, 12)
	c.recorder = shared.NewRecorder(t.Context(), t, c.workloads)
	c.replicas = newReplicas(ctx, t, 3, managers)
	for _, r := range c.replicas {
		r.proxy.Add(faultproxy.Rule{Match: isWork, Delay: workDelay})
	}
	fleet.Eventually(ctx, t, func() error { return c.workloads.Settled(ctx) })
	return c
}

// inject injects one fault, sometimes together with another, and waits until all is well again.
func (c *campaign) inject(i int, f fault) {
	t, name := c.t, f.name
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(t.Context(), fleet.Patience, fmt.Errorf("it took longer than %s", fleet.Patience))
	defer cancel()
	combined := []fault{f}
	if second := faults[c.rand.IntN(len(faults))]; f.combinesWith(second) && c.rand.IntN(5) == 0 {
		combined = append(combined, second)
		name += " + " + second.name
	}
	stop := c.workloads.Stream(ctx, changePeriod)
	fleet.Wait(ctx, time.Duration(c.rand.IntN(600))*time.Millisecond) // at any phase of the renewals
	begin := time.Now()
	err := c.injectAll(ctx, combined)
	healed := time.Now()
	if err == nil {
		err = c.restartEnded()
	}
	stop()
	// Work that has failed often waits for its back-off, after some faults for minutes. The next
	// change does not.
	for i := range c.workloads.Size {
		if err == nil {
			err = fleet.Poll(ctx, func() error { return c.workloads.Change(ctx, i) })
		}
	}
	if err == nil {
		err = fleet.Poll(ctx, func() error { return c.checkHealthy(ctx) })
	}
	if err != nil {
		t.Errorf("seed %d, fault %d, %s: %v", c.seed, i, name, err)
	}
	c.judge(i, f.name, name, begin, time.Since(healed))
}

func (c *campaign) injectAll(ctx context.Context, combined []fault) error {
	leader, err := c.replicas.waitForLeader(ctx)
	if err != nil {
		return err
	}
	errs := make([]error, len(combined))
	var wg sync.WaitGroup
	for i, f := range combined {
		standbys := c.replicas.others(leader)
		inj := &injection{Rand: rand.New(rand.NewPCG(c.rand.Uint64(), 0)), replicas: c.replicas, leader: leader, standby: standbys[c.rand.IntN(len(standbys))]}
		wg.Go(func() {
			if err := f.inject(ctx, inj); err != nil {
				errs[i] = fmt.Errorf("%s: %w", f.name, err)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// restartEnded restarts ended managers, as a kubelet would.
func (c *campaign) restartEnded() error {
	for _, r := range c.replicas {
		if r.hasEnded() {
			if err := r.start(); err != nil {
				return err
			}
		}
	}
	return nil
}

// checkHealthy returns nil once every manager is ready, somebody leads and all work is done.
func (c *campaign) checkHealthy(ctx context.Context) error {
	if err := c.restartEnded(); err != nil { // a manager may notice late that it no longer leads
		return err
	}
	for _, r := range c.replicas {
		if err := r.checkReady(); err != nil {
			return err
		}
	}
	if _, err := c.replicas.leader(ctx); err != nil {
		return err
	}
	return c.workloads.Settled(ctx)
}

// judge judges everything that has happened and adds up what is new.
func (c *campaign) judge(i int, kind, name string, begin time.Time, recovery time.Duration) {
	t := c.t
	t.Helper()
	got, err := c.recorder.Judge()
	assert.NoError(t, err)
	k := c.kinds[kind]
	if k == nil {
		k = &tally{}
		c.kinds[kind] = k
	}
	k.injected++
	k.recovered = append(k.recovered, recovery)
	var gap time.Duration
	for _, a := range got.Acquisitions {
		if a.Time.After(begin) {
			gap = max(gap, a.Time.Sub(a.Previous.Time))
			k.gaps = append(k.gaps, a.Time.Sub(a.Previous.Time))
		}
	}
	for _, f := range got.Findings {
		if c.reported[f.Revision] == f.Verdict {
			continue
		}
		c.reported[f.Revision] = f.Verdict
		k.findings++
		if f.Stale() && *flagFence == "both" {
			t.Errorf("seed %d, fault %d, %s: %s\n%s", c.seed, i, name, f, c.recorder.Around(f.Revision))
		} else {
			t.Logf("fault %d, %s: %s", i, name, f)
		}
	}
	t.Logf("fault %d, %s: %d acquisitions, longest gap %s, all done %s after its end", i, name,
		len(got.Acquisitions)-len(c.last.Acquisitions), gap.Round(time.Millisecond), recovery.Round(time.Millisecond))
	c.last = got
}

// logReport prints the figures of the whole campaign.
func (c *campaign) logReport() {
	var text strings.Builder
	w := tabwriter.NewWriter(&text, 0, 0, 2, ' ', tabwriter.AlignRight)
	// Writes to memory.
	_, _ = fmt.Fprintln(w, "fault\tinjected\tacquisitions\tmedian gap\tlongest gap\tlongest recovery\tlate writes\t")
	total := 0
	for _, f := range faults {
		k := c.kinds[f.name]
		if k == nil {
			continue
		}
		total += k.injected
		slices.Sort(k.gaps)
		median, longest := "", ""
		if n := len(k.gaps); n > 0 {
			median, longest = k.gaps[n/2].Round(time.Millisecond).String(), k.gaps[n-1].Round(time.Millisecond).String()
		}
		_, _ = fmt.Fprintf(w, "%s\t%d\t%d\t%s\t%s\t%s\t%d\t\n", f.name, k.injected, len(k.gaps), median, longest, slices.Max(k.recovered).Round(time.Millisecond), k.findings)
	}
	_ = w.Flush()
	counts := map[judge.Verdict]int{}
	for _, f := range c.last.Findings {
		counts[f.Verdict]++
	}
	c.t.Logf("seed %d, %d faults (some with a second one): %d writes judged, %d of them by what a watch has shown; %d refused by the fence in the API server; %d stale; findings %v\n%s",
		c.seed, total, c.last.Writes, c.last.Unlogged, c.recorder.Refused(), len(c.last.Stale()), counts, text.String())
}
