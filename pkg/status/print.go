// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package status

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
)

const none = "<none>"

// write writes the report to w as json, as yaml or, for people, as tables.
func (r *report) write(w io.Writer, format string, now time.Time) error {
	switch format {
	case "json":
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(r)
	case "yaml":
		text, err := yaml.Marshal(r)
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	}
	t := table{tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)}
	r.printLeader(t, now)
	r.printReplicas(t, now)
	r.printControllers(t, now)
	if len(r.Problems) > 0 {
		fmt.Fprintf(w, "\nNot all could be read:\n")
	}
	for _, p := range r.Problems {
		fmt.Fprintf(w, "  %s\n", printable(oneLine(p)))
	}
	return nil
}

func (r *report) printLeader(t table, now time.Time) {
	l := r.Leader
	who := fmt.Sprintf("%s (%s)", l.Pod, l.Holder)
	switch {
	case l.Holder == "" && l.Leads:
		who = l.Pod + ", as it says itself"
	case l.Holder == "":
		who = none
	case l.starting:
		who = none + ": " + l.Holder + " holds the Lease and does not lead yet"
	case !l.Leads:
		who = none + ": " + l.Holder + " has not renewed in time"
	}
	at := func(when *metav1.Time) string {
		if when == nil {
			return none
		}
		return when.UTC().Format(time.RFC3339) + " (" + age(when, now) + " ago)"
	}
	t.row("Lease:", l.Lease)
	t.row("Leader:", who)
	if l.LeaseUID != "" { // the Lease has been read
		t.row("Leads since:", at(l.Since))
		t.row("Term:", fmt.Sprintf("%d of the Lease with UID %s", l.Term, l.LeaseUID))
		t.row("Renewed:", fmt.Sprintf("%s, for %ds each time", at(l.Renewed), l.LeaseDurationSeconds))
	}
	t.row("API fence:", fmt.Sprintf("%s (%s)", r.Fence.State, r.Fence.Source))
	t.end()
}

func (r *report) printReplicas(t table, now time.Time) {
	fmt.Fprintln(t)
	t.row("REPLICA", "PHASE", "POD", "READY", "RESTARTS", "AGE", "NODE", "ENDPOINT")
	for _, replica := range r.Replicas {
		ready, endpoint := "no", replica.Endpoint
		if replica.Ready {
			ready = "yes"
		}
		switch {
		case !replica.Reached:
			endpoint = "not reached: " + replica.Error
		case replica.Error != "":
			endpoint += ", but " + replica.Error
		case replica.Problem != "":
			endpoint += ", but " + oneLine(replica.Problem)
		case replica.LeaderProcess == string(protocol.LeaderUnreachable):
			endpoint += ", but it cannot reach the leader's"
		}
		t.row(replica.label(), replica.Phase, replica.PodPhase, ready, fmt.Sprint(replica.Restarts),
			age(replica.Started, now), replica.Node, endpoint)
	}
	t.end()
}

func (r *report) printControllers(t table, now time.Time) {
	fmt.Fprintln(t)
	t.row("CONTROLLER", "REPLICA", "PHASE", "WORKERS", "QUEUE", "BUSY", "FAILING", "RECONCILES", "ERRORS", "PANICS", "RESTARTS", "PROBLEM", "LAST ERROR")
	for _, replica := range r.Replicas {
		for _, c := range replica.Controllers {
			last := ""
			if e := c.LastError; e != nil {
				last = fmt.Sprintf("%s ago, %s: %s", age(&metav1.Time{Time: e.Time}, now), e.Key, oneLine(e.Text))
			}
			t.row(c.Name, replica.label(), string(c.Phase), fmt.Sprint(c.Workers), fmt.Sprint(c.QueueDepth), fmt.Sprint(len(c.InFlight)),
				fmt.Sprint(c.Failing), fmt.Sprint(c.Reconciles), fmt.Sprint(c.Errors), fmt.Sprint(c.Panics), fmt.Sprint(c.Restarts), oneLine(c.Problem), last)
		}
	}
	t.end()
}

func oneLine(text string) string { return strings.ReplaceAll(text, "\n", "; ") }

// printable replaces what could move the cursor of a terminal or reorder its text.
func printable(text string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, text)
}

// label returns how a row names the replica: by its Pod or, if that is unknown, by its endpoint.
func (r *replica) label() string {
	if r.Name == "" {
		return r.Endpoint
	}
	return r.Name
}

// age returns the time since t, as kubectl shows it, or "" if t is nil.
func age(t *metav1.Time, now time.Time) string {
	if t == nil {
		return ""
	}
	return duration.HumanDuration(now.Sub(t.Time))
}

// table prints rows in columns, as kubectl does.
type table struct{ *tabwriter.Writer }

func (t table) row(cells ...string) {
	for i := range cells {
		if cells[i] = printable(cells[i]); cells[i] == "" {
			cells[i] = none
		}
	}
	fmt.Fprintln(t, strings.Join(cells, "\t"))
}

// end prints the rows so far. Later rows get columns of their own.
func (t table) end() { _ = t.Flush() } // nobody would read an error
