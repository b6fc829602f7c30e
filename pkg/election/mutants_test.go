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
	"strings"
	"testing"
)

var (
	mutants     = flag.String("mutants", "", "check that the simulation notices when a rule is broken: quick (one of each rule) or all")
	mutantSeeds = flag.Int("mutant-seeds", 2000, "how many seeds it has to notice")
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
		"done.lease, done.err = r.client.Update(request, lease, metav1.UpdateOptions{})",
		"if now, err := r.client.Get(request, r.name, metav1.GetOptions{}); err == nil {\nlease.ResourceVersion = now.ResourceVersion\n}\n" +
			"done.lease, done.err = r.client.Update(request, lease, metav1.UpdateOptions{})"},

	// 2: a term is valid from before the request.
	{"2: validity counts from after the answer", true, "requests.go",
		"done.took = r.clock.Now() - sent", "done.took = r.clock.Now() - sent\ndone.sent = r.clock.Now()"},
	{"2: the renew deadline leaves no margin", false, "config.go",
		"deadline: c.RenewDeadline.Duration,", "deadline: c.LeaseDuration.Duration,"},
	{"2: the fence opens anew by an answer that came too late", false, "fence.go",
		"if !f.withinTerm(now) {\n\t\treturn false\n\t}\n\tf.deadline = deadline", "f.state, f.deadline = fenceOpen, deadline\n_ = now"},

	// 3: a standby waits for the duration of the record.
	{"3: a lease is taken a retry period before its claim runs out", true, "protocol.go",
		"claim := now + duration ", "claim := now + duration - p.own.retry "},
	{"3: records are compared in seconds instead of versions", false, "protocol.go",
		"p.claim, p.duration = claim, duration", "if before == nil || before.Spec.RenewTime == nil || !isSameHolding(before, lease) || " +
			"before.Spec.RenewTime.Unix() != lease.Spec.RenewTime.Unix() {\np.claim, p.duration = claim, duration\n}"},
	{"3: a shortened duration counts at once", false, "protocol.go",
		"duration = p.durationAfter(before, lease, gapless)", "_ = gapless"},

	// 4: a standby does not wait after a release.
	{"4: a release is waited for like a claim", true, "protocol.go",
		"if p.isFreed(lease) {", "if false {"},
	{"4: a holder that was edited away counts as released", false, "record.go",
		"if holderOf(lease) != \"\" {\n\t\treturn false\n\t}", "if true {\n\t\treturn holderOf(lease) == \"\"\n\t}"},
	{"4: the transitions are not counted", false, "record.go",
		"termOf(lease).next().Transitions", "termOf(lease).Transitions"},

	// 5: a standby waits after anything irregular.
	{"5: a deleted lease is forgotten", true, "protocol.go",
		"\t\tp.distrust = max(p.freeAt(), now+max(p.own.lease, p.duration))\n\t\tp.claim", "\t\tp.claim"},
	{"5: a thief is trusted", false, "protocol.go",
		"\t\tp.distrust = max(p.freeAt(), now+max(p.own.lease, p.duration))\n\t}", "\t}"},
	{"5: a replica that was blind trusts the new record", false, "protocol.go",
		"case !p.isExpired(now) || !gapless:", "case !p.isExpired(now):"},

	// 6: who creates the Lease does not lead by that.
	{"6: whoever creates the lease leads at once", true, "run.go",
		"p.onCreated(msg.lease, now)", "return p.onAcquired(msg.lease, msg.sent, now)"},

	// 7: the client's fence.
	{"7: the fence goes by a timer instead of the clock", true, "fence.go",
		"f.state == fenceOpen && f.withinTerm(now)", "f.state == fenceOpen"},
	{"7: the fence admits everything", false, "lock.go",
		"return &fencedTransport{fence: l.fence, next: next}", "return next"},
	{"7: the fence does not look again before the end of the body", true, "fence.go",
		"if !b.fence.sendable(b.admission) {", "if false {"},
	{"7: what is in flight goes on when the term ends", true, "fence.go",
		"\t\ta.cancel(ErrNotLeading)\n", ""},

	// 8: the release is the last.
	{"8: the release precedes the drain", true, "run.go",
		"e.cancelLead(context.Cause(ctx))", "e.cancelLead(context.Cause(ctx))\ne.protocol.onQuiet(0)"},
	{"8: the release does not wait for writes in flight", false, "run.go",
		"e.idle = e.lock.fence.shut()", "e.lock.fence.shut()\nclosed := make(chan struct{})\nclose(closed)\ne.idle = closed"},
	{"8: the release does not wait for a write without an answer", false, "fence.go",
		"f.quiet = now + lateness", "f.quiet = now"},
	{"8: the lease is released although the drain timed out", false, "protocol.go",
		"return action{kind: actEnd, reason: ReasonDrainTimeout}", "p.quietAt = now\nreturn action{kind: actRelease}"},
	{"8: the lease is released although lead has left work behind", false, "run.go",
		"unfinished := errors.Is(e.leadErr, ErrUnfinished)", "unfinished := false"},

	// 9: a holder ends its term at once.
	{"9: a deletion does not end the term", true, "protocol.go",
		"case lease == nil:\n\t\tp.lost = ReasonLeaseDeleted", "case lease == nil:"},
	{"9: another UID does not end the term", false, "protocol.go",
		"p.lost = ReasonLeaseReplaced", ""},
	{"9: another holder does not end the term", false, "protocol.go",
		"p.lost = ReasonHolderChanged", ""},
	{"9: the fence closes only after lead has returned", false, "run.go",
		"e.lock.fence.close() // rule 9: before lead's context ends", ""},

	// 10: versions that go back.
	{"10: an older version is a late echo, whoever tells it", true, "protocol.go",
		"case p.readFrom == newest && isOlder(lease, newest): // rule 10", "case false:"},

	// 11: an acquisition without an answer.
	{"11: whoever is named in the lease leads", false, "protocol.go",
		"return a != nil && holderOf(lease) == p.identity && termOf(lease) == a.term && lease.Spec.AcquireTime.Equal(a.acquired)",
		"return holderOf(lease) == p.identity && a != nil || holderOf(lease) == p.identity"},
	{"11: each attempt has an acquireTime of its own", true, "protocol.go",
		"lease.Spec.AcquireTime = p.attempt.acquired // rule 11", ""},

	// 12: evidence.
	{"12: evidence counts without the fence in the API server", true, "evidence.go",
		"if !p.fenced || p.watched", "if p.watched"},
	{"12: silence alone is evidence", true, "evidence.go",
		"max(p.leaderSince, p.claim-p.duration+p.own.unheardFor())", "p.leaderSince"},
	{"12: an overdue renewal alone is evidence", true, "evidence.go",
		"case LeaderSilent:\n\t\tat", "case LeaderSilent, LeaderAnswers:\n\t\tat"},
	{"12: a renewal does not refute silence", true, "evidence.go",
		"if p.leader == LeaderSilent || p.leader", "if p.leader"},
	{"12: what was seen of one holder counts against the next", true, "evidence.go",
		"p.watched, p.leader = p.watchable(), LeaderUnknown", "p.watched = p.watchable()"},
	{"12: after silence, the new leader writes at once", true, "serverfence_lead.go",
		"case early.evidence == LeaderSilent:", "case false:"},
	{"12: whoever takes the lease early does not ask for the fence again", true, "serverfence_lead.go",
		"case n.lock.shown.serverFence() != ServerFenceEnforced:", "case false:"},
	{"12: nobody is cautious after a mistake", true, "evidence.go",
		"p.cautious = now + p.own.lease", "p.cautious = now"},
	{"12: a former leader that is alive does not say so", false, "run.go",
		"\t\te.objectToTakeover(ctx)\n", ""},
	{"12: a successor that was silent is trusted", false, "protocol.go",
		"noteOf(lease).Evidence == LeaderGone:", "noteOf(lease).Evidence != \"\":"},
	{"12: no evidence counts", false, "evidence.go",
		"return max(at, p.distrust, p.cautious)", "return max(at, never)"},

	// Liveness.
	{"liveness: nobody looks again when the watch is dead", false, "protocol.go",
		"p.readAt = now + p.backoff(p.writeFails, p.own.retry/16, p.patience(f), f)", "p.readAt = never"},
	{"liveness: a write that is refused is sent again at once", true, "protocol.go",
		"p.writeAt = now + p.backoff(p.writeFails, p.own.retry, p.patience(f), f)", "p.writeAt = now"},

	// The fence in the API server.
	{"fence: the name is written whatever the version", true, "serverfence_lead.go",
		"\"uid\": ns.UID, \"resourceVersion\": ns.ResourceVersion,", ""},
	{"fence: the lease is not read before the name is written", false, "serverfence_lead.go",
		"return ns, n.lock.confirmHolder(ctx)", "return ns, nil"},
	{"fence: the Namespace is read when the lease has been taken", true, "requests.go",
		"r.report(ctx, done)", "prepare(ctx)\nr.report(ctx, done)"},
	{"fence: lead starts before the name is written", true, "serverfence_lead.go",
		"err := n.raise(ctx, 0)\n\t\tswitch {", "err := error(nil)\n\t\tswitch {"},
	{"fence: the leader does not name itself again", false, "serverfence_lead.go",
		"if err != nil || n.isNamed(ns) {\n\t\treturn err\n", "if err != nil || n.isNamed(ns) || n.raised > 0 {\n\t\treturn err\n"},
}

// TestMutants runs the simulation on mutants of the package. They are built with the flag -overlay,
// so that the tested code needs no switches.
func TestMutants(t *testing.T) {
	if *mutants == "" {
		t.Skip("takes a build per mutant; run it with -mutants=quick or -mutants=all")
	}
	rules := regexp.MustCompile(`(?m)((?:seed \d+: )?(?:` + quotedRules() + `)).*$|^panic: .*$`)
	for _, m := range allMutants {
		if !m.quick && *mutants != "all" {
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
	if err != nil {
		t.Fatal(err)
	}
	if n := bytes.Count(source, []byte(m.old)); n != 1 {
		t.Fatalf("%s: found %d times: %s", m.file, n, m.old)
	}
	path, err := filepath.Abs(m.file)
	if err != nil {
		t.Fatal(err)
	}
	edited, list := filepath.Join(t.TempDir(), "edited.go"), filepath.Join(t.TempDir(), "overlay.json")
	if err := os.WriteFile(edited, bytes.Replace(source, []byte(m.old), []byte(m.new), 1), 0o600); err != nil {
		t.Fatal(err)
	}
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{path: edited}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(list, overlay, 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-vet=off", "-ldflags=-s -w", "-overlay", list, "-failfast",
		"-run", "^TestSimulat(ion$|ed)", "-skip", "^TestSimulatedStaleWrites$", ".", "-seeds", strconv.Itoa(*mutantSeeds))
	return cmd.CombinedOutput()
}
