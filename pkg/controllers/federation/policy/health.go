// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"strings"
)

// ProbeResult is what a probe found.
type ProbeResult int

// Results of a probe. Unknown means that there was none.
const (
	Unknown   ProbeResult = iota
	Healthy               // GET /healthz answered 200 and ok
	Unhealthy             // another answer
	NoAnswer              // no answer
	NoClient              // the KubeFedCluster or its Secret gives no client
)

// ReadHealthz returns what an answer to GET /healthz means.
func ReadHealthz(code int, body string) ProbeResult {
	if code == 200 && strings.EqualFold(body, "ok") {
		return Healthy
	}
	return Unhealthy
}

// Health is the state of a cluster. Its zero value takes the first result.
type Health struct {
	// State is the result after thresholds. Healthy means ready, every other result not ready.
	State ProbeResult
	// Error is why there was no answer.
	Error string
	// streak is how many results in a row contradict the state.
	streak int64
}

// StartHealth returns the health that a new leader begins with. Without a condition Ready, the first
// result counts.
func StartHealth(s ClusterStatus) Health {
	status := map[string]string{}
	for _, c := range s.Conditions {
		status[c.Type] = c.Status
	}
	switch {
	case status[Ready] == "True":
		return Health{State: Healthy}
	case status[Ready] != "False":
		return Health{}
	case status[ConfigMalformed] == "True":
		return Health{State: NoClient}
	case status[Offline] == "True":
		return Health{State: NoAnswer}
	}
	return Health{State: Unhealthy}
}

// Ready reports whether the cluster is ready.
func (h Health) Ready() bool { return h.State == Healthy }

// maxError limits the text of an error that is repeated in a condition or another error, in bytes.
const maxError = 256

// Next returns the health after a probe.
func (h Health) Next(r ProbeResult, err string, c Config) Health {
	next := Health{State: r, Error: truncate(err, maxError)}
	threshold := c.FailureThreshold
	if r == Healthy {
		threshold = c.SuccessThreshold
	}
	switch {
	case h.State == Unknown, r == NoClient, (h.State == Healthy) == (r == Healthy), h.streak+1 >= threshold:
		return next
	}
	h.streak++
	return h
}

// conditions returns the whole list, without times.
func (h Health) conditions() []ClusterCondition {
	condition := func(kind, status, reason, message string) ClusterCondition {
		return ClusterCondition{Type: kind, Status: status, Reason: reason, Message: message}
	}
	switch h.State {
	case Healthy:
		return []ClusterCondition{condition(Ready, "True", "ClusterReady", "/healthz responded with ok")}
	case Unhealthy:
		return []ClusterCondition{condition(Ready, "False", "ClusterNotReady", "/healthz responded without ok"),
			condition(Offline, "False", "ClusterReachable", "cluster is reachable")}
	case NoAnswer:
		text := "cluster is not reachable: " + h.Error
		return []ClusterCondition{condition(Offline, "True", "ClusterNotReachable", text), condition(Ready, "False", "ClusterNotReachable", text)}
	case NoClient:
		text := "cluster's configuration may be malformed"
		return []ClusterCondition{condition(ConfigMalformed, "True", "ClusterConfigMalformed", text), condition(Ready, "False", "ClusterConfigMalformed", text)}
	}
	return nil
}

// Availability is whether a cluster serves a type.
type Availability string

// States of a type in a cluster. NotListed is the state until the first list is complete.
const (
	NotListed Availability = "NotListed"
	Synced    Availability = "Synced"
	Absent    Availability = "Absent"
	Forbidden Availability = "Forbidden"
)

// Status returns what the federated object reports of a cluster in this state, or "" if its cache can be
// used. The cache of a type that is absent counts as empty.
func (s Availability) Status() string {
	return map[Availability]string{NotListed: CachedRetrievalFailed, Absent: APINotAvailable, Forbidden: RetrievalFailed}[s]
}
