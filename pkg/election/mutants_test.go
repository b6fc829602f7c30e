// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// mutant breaks one rule of docs/adr/0003-leader-election.md, or of the fence in the API server, by
// one edit. It replaces text that occurs exactly once in its file.
type mutant struct {
	what           string
	quick          bool // there is one for each rule
	file, old, new string
}

var allMutants = []mutant{
	// 1: writes are conditional.
	{"1: a write goes by the version of now instead of the one that was judged", true, "requests.go",
		"return e.lock.candidate.Client.Update(ctx, lease, metav1.UpdateOptions{})",
		"if now, err := e.lock.candidate.Client.Get(ctx, e.lock.lease.Name, metav1.GetOptions{}); err == nil {\nlease.ResourceVersion = now.ResourceVersion\n}\n" +
			"return e.lock.candidate.Client.Update(ctx, lease, metav1.UpdateOptions{})"},

	// 2: a term is valid from before the request.
	{"2: validity counts from after the answer", true, "requests.go",
		"took := e.now() - sent", "took := e.now() - sent\nsent = e.now()"},
	{"2: the renew deadline leaves no margin", false, "config.go",
		"Deadline: c.RenewDeadline.Duration,", "Deadline: c.LeaseDuration.Duration,"},
	{"2: the shortest safe lease leaves no margin", false, "protocol/timing.go",
		"float64(deadline)*(1+ClockRateError)/(1-ClockRateError) + float64(SettleTime)", "float64(deadline)"},
	{"2: the fence opens anew by an answer that came too late", false, "writefence/fence.go",
		"if !f.isValid(now) {\n\t\treturn false\n\t}\n\tf.deadline = deadline", "f.state, f.deadline = open, deadline\n_ = now"},

	// 3: a standby waits for the duration of the record.
	{"3: a Lease is taken a retry period before its claim runs out", true, "protocol/learn.go",
		"expires := now + duration ", "expires := now + duration - s.timing.Retry "},
	{"3: records are compared in seconds instead of versions", false, "protocol/learn.go",
		"s.claimExpires, s.duration = expires, duration", "if before == nil || before.Spec.RenewTime == nil || !isSameHolding(before, lease) || " +
			"before.Spec.RenewTime.Unix() != lease.Spec.RenewTime.Unix() {\ns.claimExpires, s.duration = expires, duration\n}"},
	{"3: a shortened duration counts at once", false, "protocol/learn.go",
		"duration = s.durationAfter(before, lease, gapless)", "_ = gapless"},

	// 4: a standby does not wait after a release.
	{"4: a release is waited for like a claim", true, "protocol/learn.go",
		"if s.isFreed(lease) {", "if false {"},
	{"4: a holder that was edited away counts as released", false, "protocol/lease.go",
		"if HolderOf(lease) != \"\" {\n\t\treturn false\n\t}", "if true {\n\t\treturn HolderOf(lease) == \"\"\n\t}"},
	{"4: the transitions are not counted", false, "protocol/lease.go",
		"TermOf(lease).next().Transitions", "TermOf(lease).Transitions"},

	// 5: a standby waits after anything irregular.
	{"5: a deleted Lease is forgotten", true, "protocol/learn.go",
		"\t\ts.distrustUntil = max(s.freeAt(), now+max(s.timing.Lease, s.duration))\n\t\ts.claimExpires", "\t\ts.claimExpires"},
	{"5: a thief is trusted", false, "protocol/learn.go",
		"\t\ts.distrustUntil = max(s.freeAt(), now+max(s.timing.Lease, s.duration))\n\t}", "\t}"},
	{"5: a replica that was blind trusts the new record", false, "protocol/learn.go",
		"case !s.isExpired(now) || !gapless:", "case !s.isExpired(now):"},

	// 6: who creates the Lease does not lead by that.
	{"6: whoever creates the Lease leads at once", true, "requests.go",
		"state.OnCreated(lease, now)", "if state.OnAcquired(lease, sent, now) {\ne.beginTerm()\n}"},

	// 7: the client's fence.
	{"7: the fence goes by a timer instead of the clock", true, "writefence/fence.go",
		"f.state == open && f.isValid(now)", "f.state == open"},
	{"7: the fence admits everything", false, "lock.go",
		"next = l.fence.Transport(next)", ""},
	{"7: the fence does not look again before the end of the body", true, "writefence/fence.go",
		"if !b.fence.isSendable(b.admission) {", "if false {"},
	{"7: what is in flight goes on when the term ends", true, "writefence/fence.go",
		"\ta.cancel(ErrTermEnded)\n", ""},

	// 8: the release is the last.
	{"8: the release precedes the drain", true, "run.go",
		"e.cancelLead(context.Cause(ctx))", "e.cancelLead(context.Cause(ctx))\ne.state.OnQuiet(0, 0)"},
	{"8: the release does not wait for writes in flight", false, "run.go",
		"e.idle = e.lock.fence.Drain()", "e.lock.fence.Drain()\nclosed := make(chan struct{})\nclose(closed)\ne.idle = closed"},
	{"8: the release does not wait for a write without an answer", false, "writefence/fence.go",
		"f.quietAt = now + serverTimeout", "f.quietAt = now"},
	{"8: the Lease is released although lead has left work behind", false, "run.go",
		"unfinished := errors.Is(e.leadErr, ErrUnfinished)", "unfinished := false"},

	// 9: a holder ends its term at once.
	{"9: a deletion does not end the term", true, "protocol/term.go",
		"case lease == nil:\n\t\ts.endReason = ReasonLeaseDeleted", "case lease == nil:"},
	{"9: another UID does not end the term", false, "protocol/term.go",
		"s.endReason = ReasonLeaseReplaced", ""},
	{"9: another holder does not end the term", false, "protocol/term.go",
		"s.endReason = ReasonHolderChanged", ""},
	{"9: the fence closes only after lead has returned", false, "run.go",
		"e.lock.fence.Close() // rule 9: before lead's context ends", ""},

	// 10: versions that go back.
	{"10: an older version is a late echo, whoever tells it", true, "protocol/state.go",
		"case s.readFrom == newest && isOlder(lease, newest): // rule 10", "case false:"},

	// 11: a term that needs a proof.
	{"11: a missing proof does not keep the Lease from being released", true, "protocol/term.go",
		"func (s *State) releaseAt() time.Duration { return max(s.quietAt, s.proofUntil) }", "func (s *State) releaseAt() time.Duration { return s.quietAt }"},
	{"11: a missing proof does not keep lead from starting", true, "protocol/term.go",
		"case s.admitted && now >= s.proofUntil: // rule 11", "case s.admitted:"},
	{"11: no term needs a proof", false, "protocol/state.go",
		"act.ProofUntil, at = at, now", "at = now"},
	{"11: a term needs a proof for less than its predecessor's claim", false, "protocol/state.go",
		"act.ProofUntil, at = at, now", "act.ProofUntil, at = at-s.timing.Lease/2, now"},
	{"11: no hint counts", false, "protocol/state.go",
		"case now < at && s.isLeaderGone(): // rule 11", "case false:"},
	{"11: two seconds take the place of the proof", true, "apifence/proof.go",
		"err := f.proveOnce(ctx)", "f.pauseFor(ctx, 2*time.Second, 2*time.Second+1)\nerr := error(nil)\n_ = f.proveOnce"},
	{"11: fewer addresses than API servers are enough", true, "apifence/proof.go",
		"case len(known) < count:", "case false:"},
	{"11: an API server that does not admit this replica is ignored", true, "apifence/proof.go",
		"if reply != verdictAdmits && err == nil {", "if reply == verdictRefuses {\nerr = nil\n} else if reply != verdictAdmits && err == nil {"},
	{"11: an API server without the policy admits this replica", false, "apifence/proof.go",
		"if reply != verdictAdmits && err == nil {", "if reply != verdictAdmits && reply != verdictAbsent && err == nil {"},
	{"11: an API server that does not answer is ignored", false, "apifence/proof.go",
		"if err != nil {\n\t\t\treturn fmt.Errorf(\"the API server", "if err != nil && reply != verdictNone {\n\t\t\treturn fmt.Errorf(\"the API server"},
	{"11: only the first API server is asked", false, "apifence/proof.go",
		"range known {", "range known[:1] {"},

	// Liveness.
	{"liveness: nobody looks again when the watch is dead", false, "protocol/state.go",
		"s.readAt = now + s.backoff(s.writeFails, s.timing.Retry/16, s.backoffLimit(f), f)", "s.readAt = never"},
	{"liveness: a write that is refused is sent again at once", true, "protocol/state.go",
		"case FailRefused:\n\t\ts.writeAt = now + s.backoff(s.writeFails, s.timing.Retry, s.backoffLimit(f), f)", "case FailRefused:\n\t\ts.writeAt = now"},

	// The fence in the API server.
	{"fence: the name is written whatever the version", true, "apifence/name.go",
		"\"uid\": ns.UID, \"resourceVersion\": ns.ResourceVersion,", ""},
	{"fence: the Lease is not read before the name is written", true, "apifence/name.go",
		"if err := f.confirmHolder(readCtx); err != nil {", "if err := error(nil); err != nil {"},
	{"fence: lead starts before the name is written", true, "run.go",
		"err := e.lock.apiFence.NameLeader(startCtx)", "err := error(nil)"},
	{"fence: the leader does not name itself again", false, "apifence/name.go",
		"if err := f.nameLeader(ctx, true); err != nil && ctx.Err() == nil {", "if err := error(nil); err != nil {"},
	{"fence: a holder that cannot lead keeps the Lease", false, "protocol/term.go",
		"case !s.admitted && now >= s.acquiredAt+s.timing.Lease:\n\t\treturn ActGiveUp", "case !s.admitted && now >= s.acquiredAt+s.timing.Lease:\n\t\ts.acquiredAt = now"},
}

// TestMutants runs the simulation on mutants of the package. They are built with the flag -overlay,
// so that the tested code needs no switches. MUTANTS says which: quick (one of each rule) or all.
// MUTANT_SEEDS says in how many seeds the simulation has to notice.
func TestMutants(t *testing.T) {
	mutants := os.Getenv("MUTANTS")
	if mutants == "" {
		t.Skip("takes a build per mutant; run it with MUTANTS=quick or MUTANTS=all")
	}
	rules := regexp.MustCompile(`(?m)((?:seed \d+: )?(?:` + quotedRules() + `)).*$|^panic: .*$`)
	for _, m := range allMutants {
		if !m.quick && mutants != "all" {
			continue
		}
		t.Run(m.what, func(t *testing.T) {
			t.Parallel()
			out, err := runMutant(t, m)
			switch found := rules.Find(out); {
			case bytes.Contains(out, []byte("panic: test timed out")):
				t.Errorf("the simulation hangs:\n%s", out)
			case err == nil:
				t.Errorf("the simulation has not noticed")
			case found == nil:
				t.Errorf("the mutant did not run:\n%s", out)
			default:
				t.Logf("%s", found)
			}
		})
	}
}

func quotedRules() string {
	var quoted []string
	for _, rule := range allRules {
		quoted = append(quoted, regexp.QuoteMeta(rule))
	}
	return strings.Join(quoted, "|")
}

// runMutant runs the simulation with the edit.
func runMutant(t *testing.T, m mutant) ([]byte, error) {
	t.Helper()
	source, err := os.ReadFile(m.file)
	assert.NoError(t, err)
	if n := bytes.Count(source, []byte(m.old)); n != 1 {
		t.Fatalf("%s: found %d times: %s", m.file, n, m.old)
	}
	path, err := filepath.Abs(m.file)
	assert.NoError(t, err)
	edited, list := filepath.Join(t.TempDir(), "edited.go"), filepath.Join(t.TempDir(), "overlay.json")
	assert.NoError(t, os.WriteFile(edited, bytes.Replace(source, []byte(m.old), []byte(m.new), 1), 0o600))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{path: edited}})
	assert.NoError(t, err)
	assert.NoError(t, os.WriteFile(list, overlay, 0o600))
	seeds := setting(t, "MUTANT_SEEDS", 2000)
	cmd := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-ldflags=-s -w", "-overlay", list, "-failfast",
		"-run", "^TestSimulat(ion$|ed)", "-skip", "^TestSimulated(StaleWrites|StrictPlansAreStrong)$", ".")
	cmd.Env = append(os.Environ(), fmt.Sprint("SEEDS=", seeds))
	return cmd.CombinedOutput()
}
