// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
)

var mutants = flag.Int("mutants", 0, "check with that many seeds that the simulation notices when a rule is broken")

// mutations break one rule each. An edit replaces text that occurs exactly once in its file.
var mutations = map[string][]edit{
	"the fence admits everything": {
		{"lock.go", "return &fencedTransport{fence: l.fence, next: next}", "return next"},
	},
	"the fence goes by a timer instead of the clock": {
		{"fence.go", "f.state == fenceOpen && f.withinTerm(now)", "f.state == fenceOpen"},
	},
	"validity counts from after the response": {
		{"requests.go", "done.took = r.clock.Now() - sent", "done.took = r.clock.Now() - sent; done.sent = r.clock.Now()"},
	},
	"observation compares records in seconds instead of resourceVersions": {
		{"protocol.go", "p.claim, p.duration = claim, duration", "if before == nil || before.Spec.RenewTime == nil || !isSameHolding(before, lease) || " +
			"before.Spec.RenewTime.Unix() != lease.Spec.RenewTime.Unix() {\n\t\tp.claim, p.duration = claim, duration\n\t}"},
	},
	"the release precedes the drain": {
		{"run.go", "e.cancelLead(context.Cause(ctx))", "e.cancelLead(context.Cause(ctx)); e.protocol.onQuiet(0)"},
	},
	"the release does not wait for writes in flight": {
		{"run.go", "e.idle = e.lock.fence.shut()", "e.lock.fence.shut(); closed := make(chan struct{}); close(closed); e.idle = closed"},
	},
	"the lease is released although the drain timed out": {
		{"protocol.go", "return action{kind: actEnd, reason: ReasonDrainTimeout}", "p.quietAt = now; return action{kind: actRelease}"},
	},
	"the release erases whoever holds the lease": {
		{"protocol.go", "p.lost = ReasonHolderChanged", ""},
	},
	"the renew deadline leaves no margin": {
		{"config.go", "deadline: c.RenewDeadline.Duration,", "deadline: c.LeaseDuration.Duration,"},
	},
	"the transitions are not counted": {
		{"record.go", "termOf(lease).next().Transitions", "termOf(lease).Transitions"},
	},
	"a lease is taken a retry period before its claim runs out": {
		{"protocol.go", "claim := now + duration", "claim := now + duration - p.own.retry"},
	},
	"whoever creates the lease leads at once": {
		{"run.go", "p.onCreated(msg.lease, now)", "return p.onAcquired(msg.lease, msg.sent, now)"},
	},
	"a deleted lease is forgotten": {
		{"protocol.go", "\t\tp.distrust = max(p.freeAt(), now+max(p.own.lease, p.duration))\n\t\tp.claim", "\t\tp.claim"},
		{"run.go", "p.onCreated(msg.lease, now)", "return p.onAcquired(msg.lease, msg.sent, now)"},
	},
	"a thief is trusted": {
		{"protocol.go", "\t\tp.distrust = max(p.freeAt(), now+max(p.own.lease, p.duration))\n\t}", "\t}"},
	},
	"a holder that was edited away counts as released": {
		{"record.go", "if holderOf(lease) != \"\" {\n\t\treturn false\n\t}", "if true {\n\t\treturn holderOf(lease) == \"\"\n\t}"},
		{"record.go", "&& !later.Spec.RenewTime.Equal(earlier.Spec.RenewTime)", ""},
	},
	"a shortened duration counts at once": {
		{"protocol.go", "duration = p.durationAfter(before, lease, gapless)", ""},
	},
	"whoever is named in the lease leads": {
		{"protocol.go", "return a != nil && holderOf(lease) == p.identity && termOf(lease) == a.term && lease.Spec.AcquireTime.Equal(a.acquired)",
			"_ = a; return holderOf(lease) == p.identity"},
	},
	"a renewal that came too late extends the term": {
		{"protocol.go", "if now >= p.sent+p.own.deadline { // rule 2", "if false {"},
		{"run.go", "!e.lock.fence.extend(msg.sent+p.own.deadline)", "func() bool { e.lock.fence.close(); e.lock.fence.openUntil(msg.sent + p.own.deadline); return false }()"},
	},
	"nobody looks again when the watch is dead": {
		{"protocol.go", "p.readAt = now + p.backoff(p.writeFails, p.own.retry/16, p.patience(f), f)", "p.readAt = never"},
	},
}

type edit struct{ file, old, new string }

// TestMutants runs the simulation on mutants of the package. They are built with the flag -overlay,
// so that the tested code needs no switches.
func TestMutants(t *testing.T) {
	if *mutants == 0 {
		t.Skip("takes a build per mutant; run it with -mutants=SEEDS")
	}
	for name, edits := range mutations {
		t.Run(name, func(t *testing.T) {
			out, err := runMutant(t, edits)
			seed := regexp.MustCompile(`seed \d+: [^:\n]*`).Find(out)
			switch {
			case err == nil:
				t.Errorf("%d seeds have not noticed", *mutants)
			case seed == nil:
				t.Errorf("the mutant did not run:\n%s", out)
			default:
				t.Logf("%s", seed)
				t.Logf("%s", regexp.MustCompile(`\d+ of \d+ seeds violate.*`).Find(out))
			}
		})
	}
}

// runMutant runs TestSimulation with the edits.
func runMutant(t *testing.T, edits []edit) ([]byte, error) {
	t.Helper()
	dir := t.TempDir()
	replaced := map[string][]byte{}
	for _, e := range edits {
		source, edited := replaced[e.file]
		if !edited {
			var err error
			if source, err = os.ReadFile(e.file); err != nil {
				t.Fatal(err)
			}
		}
		if n := bytes.Count(source, []byte(e.old)); n != 1 {
			t.Fatalf("%s: found %d times: %s", e.file, n, e.old)
		}
		replaced[e.file] = bytes.Replace(source, []byte(e.old), []byte(e.new), 1)
	}
	overlay := struct{ Replace map[string]string }{map[string]string{}}
	for file, source := range replaced {
		path, err := filepath.Abs(file)
		if err != nil {
			t.Fatal(err)
		}
		overlay.Replace[path] = filepath.Join(dir, file)
		if err := os.WriteFile(overlay.Replace[path], source, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	list, err := json.Marshal(overlay)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(file, list, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-overlay", file, "-run", "^TestSimulation$", "-v", ".",
		"-seeds", strconv.Itoa(*mutants), "-keep-going")
	return cmd.CombinedOutput()
}
