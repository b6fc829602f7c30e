// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
)

// podNameExtra is the key under which kube-apiserver records the Pod that a token is bound to.
const podNameExtra = "authentication.kubernetes.io/pod-name"

// AuditLog returns the path of kube-apiserver's audit log, one JSON object a line.
func (c *Cluster) AuditLog() string { return filepath.Join(c.box.Dir, "audit.log") }

// AuditLogs returns the paths of the audit logs of all API servers.
func (c *Cluster) AuditLogs() []string {
	logs := []string{c.AuditLog()}
	if c.second != nil {
		logs = append(logs, c.second.auditLog)
	}
	return logs
}

// AuditEvents reads the audit logs of all API servers, one after the other. A log has every request
// except for health checks, at level Metadata. Patches and writes of Leases have their bodies; no
// body of a Secret or a token is logged. A request is in the log once its response was read to the
// end. A watch is in it twice, at its start and at its end.
func (c *Cluster) AuditEvents() (events []auditv1.Event, err error) {
	c.auditMu.Lock()
	defer c.auditMu.Unlock()
	if c.auditTails == nil {
		for _, path := range c.AuditLogs() {
			c.auditTails = append(c.auditTails, &AuditTail{path: path})
		}
		c.auditEvents = make([][]auditv1.Event, len(c.auditTails))
	}
	for i, tail := range c.auditTails {
		added, err := tail.Read()
		if err != nil {
			return nil, err
		}
		c.auditEvents[i] = append(c.auditEvents[i], added...)
	}
	return slices.Concat(c.auditEvents...), nil
}

// AuditTail reads what is added to an audit log.
type AuditTail struct {
	path   string
	offset int64
}

// TailAudit begins at the current ends of the audit logs of all API servers.
func (c *Cluster) TailAudit() (tails []*AuditTail, err error) {
	for _, path := range c.AuditLogs() {
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		tails = append(tails, &AuditTail{path, info.Size()})
	}
	return tails, nil
}

// Read returns the events that were added since the last call.
func (a *AuditTail) Read() (added []auditv1.Event, err error) {
	log, err := os.Open(a.path)
	if err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	defer log.Close()
	before := max(a.offset-1, 0)
	text, err := io.ReadAll(io.NewSectionReader(log, before, math.MaxInt64-before))
	if err != nil {
		return nil, fmt.Errorf("read the audit log: %w", err)
	}
	if a.offset > 0 { // maybe in the middle of a line, which is older than the tail
		end := bytes.IndexByte(text, '\n') + 1
		if end == 0 {
			return nil, nil
		}
		a.offset, text = before+int64(end), text[end:]
	}
	for line := range bytes.Lines(text) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // kube-apiserver is still writing it
		}
		var event auditv1.Event
		if err := json.Unmarshal(line, &event); err != nil {
			return nil, fmt.Errorf("read the audit log: %w", err)
		}
		added = append(added, event)
		a.offset += int64(len(line))
	}
	return added, nil
}

// AuditPod returns the name of the Pod whose token made the request, or "".
func AuditPod(event auditv1.Event) string {
	if names := event.User.Extra[podNameExtra]; len(names) == 1 {
		return names[0]
	}
	return ""
}

// AuditWrite reports whether the request changed an object: whether it was a mutating verb, not a
// dry run, and succeeded. Requests to create reviews and tokens change nothing.
func AuditWrite(event auditv1.Event) bool {
	switch event.Verb {
	case "create", "update", "patch", "delete", "deletecollection":
	default:
		return false
	}
	if event.Stage != auditv1.StageResponseComplete || event.ResponseStatus == nil || event.ResponseStatus.Code >= 300 {
		return false
	}
	if ref := event.ObjectRef; ref != nil {
		if ref.APIGroup == "authentication.k8s.io" || ref.APIGroup == "authorization.k8s.io" || ref.Subresource == "token" {
			return false
		}
	}
	return !isDryRun(event.RequestURI)
}
