// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/time/rate"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// The relevant lines of a manager's log in klog's text format: warnings, errors and these messages.
var (
	klogHeader = regexp.MustCompile(`^([IWEF])\d{4} [\d:.]+ +\d+ [^]]+\] (.*)$`)
	messages   = []string{`"Stopped leading"`, `"Handled a reload"`, `"The API server answers"`}
)

// showLog copies the relevant lines of a manager's log, on average at most one a second.
func (ms *managers) showLog(ctx context.Context, m *cluster.Manager) {
	limit := rate.NewLimiter(1, 10)
	hidden := 0
	for line := range m.Lines(ctx) {
		text, ok := relevantText(line)
		switch {
		case strings.HasPrefix(text, `"Started leading"`):
			ms.recordLeader(m)
			continue
		case !ok:
			continue
		}
		if !limit.Allow() {
			hidden++
			continue
		}
		if hidden > 0 {
			fmt.Fprintf(ms.out, "%s | (%d more lines in %s)\n", m.Pod, hidden, m.Log)
			hidden = 0
		}
		fmt.Fprintf(ms.out, "%s | %s\n", m.Pod, text)
	}
}

func relevantText(line string) (text string, ok bool) {
	match := klogHeader.FindStringSubmatch(line)
	if match == nil {
		return "", false // a stack trace, or the rest of a longer message
	}
	switch level, text := match[1], match[2]; level {
	case "W":
		return "Warning: " + text, true
	case "E", "F":
		return "Error: " + text, true
	default:
		for _, message := range messages {
			if strings.HasPrefix(text, message) {
				return text, true
			}
		}
		return text, false
	}
}

// printIntroduction prints what there is and what to try.
func (ms *managers) printIntroduction(binary string, nodes int) {
	c, out := ms.cluster, ms.out
	kubectl := quote(filepath.Join(c.Dir(), "kubectl"))
	status := quote(binary) + " status --kubeconfig=" + quote(c.Kubeconfig()) + " --endpoint-insecure"
	for _, m := range ms.list {
		status += " --endpoint=" + m.SecureURL
	}
	note, watch := "Nothing runs in the Pods, as the nodes are simulated.", "rollout status deployment/web"
	if nodes == 0 {
		note, watch = "The Pods stay Pending, as this cluster has no nodes.", "get replicasets,jobs"
	}
	fmt.Fprintf(out, "\nkubeconfig   %s\n", c.Kubeconfig())
	fmt.Fprintf(out, "logs         %s\n", filepath.Join(c.Dir(), "logs"))
	for _, m := range ms.list {
		fmt.Fprintf(out, "%s\n  health     %s/readyz?verbose\n  metrics    %s/metrics\n", m.Pod, m.InsecureURL, m.SecureURL)
	}
	fmt.Fprintf(out, `
Metrics need a token:
  curl --insecure --header "Authorization: Bearer $(%[1]s -n quartermaster-sample create token metrics-reader)" %[3]s/metrics

Try in another terminal:
  1. Edit the ConfigMap. After a second a Deployment rolls and a CronJob runs. (%[6]s)
     %[1]s -n quartermaster-sample patch configmap app-config -p "{\"data\":{\"GREETING\":\"hello at $(date)\"}}"
     sleep 2; %[1]s -n quartermaster-sample %[7]s
     %[1]s -n quartermaster-sample get pods --watch
  2. Stop the leader and watch the other take over, here:
     kill $(cat %[2]s)
  3. See who leads and what the controllers do:
     %[5]s

Ctrl-C stops everything and removes %[4]s.

`, kubectl, quote(ms.leaderPID()), ms.list[0].SecureURL, c.Dir(), status, note, watch)
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_./:@%+,=-]+$`)

// quote quotes s as one word of a POSIX shell.
func quote(s string) string {
	if plainWord.MatchString(s) {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
