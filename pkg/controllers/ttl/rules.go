// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"context"
	"encoding/binary"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
)

// typeRules are the rules that may decide on objects of a type; nil if there are none.
type typeRules struct {
	*rules.TypeRules
	typ     policy.Type
	options *policy.Options
}

// rulesFor returns the rules for a type.
func (c *controller) rulesFor(t policy.Type) *typeRules {
	if typed := c.rules.ForType(t); typed != nil {
		return &typeRules{typed, t, &c.options}
	}
	return nil
}

// verdict returns what the rules say of an object, which must be whole if a rule reads more than the
// metadata. The error, which may have values of the object, says more about a problem.
func (r *typeRules) verdict(obj metav1.Object) (rules.Verdict, error) {
	if r == nil || !r.options.MayRulesDecide(r.typ, obj) {
		return rules.Verdict{}, nil
	}
	return r.Evaluate(obj)
}

// digest returns what the cache keeps of an object: the verdict of the rules or, of an annotated object, the
// creationTimestamp, which takes several hundred bytes as a field of the cached metadata.
func (r *typeRules) digest(o metav1.Object) []byte {
	if created := o.GetCreationTimestamp(); r.options.Annotated(o) && !created.IsZero() {
		return binary.BigEndian.AppendUint64(nil, uint64(created.Unix()))
	}
	v, _ := r.verdict(o)
	return v.Encode()
}

// mayExpire reports whether the cache keeps the object at all.
func (r *typeRules) mayExpire(obj metav1.Object) bool {
	if r.options.Annotated(obj) {
		return !policy.IsCopyOrMirror(r.typ, obj)
	}
	v, _ := r.verdict(obj)
	return v.Rule != 0
}

// datedObject is an annotated object of the cache with the time in its digest.
type datedObject struct {
	metav1.Object
	created metav1.Time
}

// GetCreationTimestamp returns the time in the digest.
func (d datedObject) GetCreationTimestamp() metav1.Time { return d.created }

// withDate returns the cached object with the time in its digest, if one is there.
func withDate(obj metav1.Object) metav1.Object {
	if cached, ok := obj.(interface{ Digest(string) []byte }); ok {
		if sum := cached.Digest(Name); len(sum) == 8 {
			return datedObject{obj, metav1.Unix(int64(binary.BigEndian.Uint64(sum)), 0)}
		}
	}
	return obj
}

// verdictOf returns the verdict in the digest of a cached object.
func verdictOf(obj metav1.Object) rules.Verdict {
	if cached, ok := obj.(interface{ Digest(string) []byte }); ok {
		return rules.Decode(cached.Digest(Name))
	}
	return rules.Verdict{}
}

// RuleFault is an object for which a rule cannot be evaluated.
type RuleFault struct {
	Object string    `json:"object"`
	Reason string    `json:"reason"`
	Time   time.Time `json:"time"`
}

// reportFault reports an object for which a rule cannot be evaluated. It records no Event, since anybody may
// create many such objects.
func (c *controller) reportFault(ctx context.Context, key objectKey, verdict rules.Verdict) {
	rule, now := c.rules.RuleOf(verdict).Name, time.Now()
	c.metrics.ruleErrors.WithLabelValues(rule).Inc()
	if c.faultNotices.Due(rule, now) {
		klog.FromContext(ctx).Error(nil, "A rule cannot be evaluated for an object, which is not deleted",
			"rule", rule, "object", key.String(), "reason", verdict.Problem.String())
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.faults[rule] = RuleFault{Object: key.String(), Reason: verdict.Problem.String(), Time: now}
}

// RuleStatus is what /debug/controllers/ttl shows of a rule.
type RuleStatus struct {
	Rule      string     `json:"rule"`
	DryRun    bool       `json:"dryRun,omitempty"`
	Objects   int        `json:"objects"` // the number of objects that expire by it
	Overdue   int        `json:"overdue"`
	LastFault *RuleFault `json:"lastFault,omitempty"`
}

// ruleStatuses returns the state of the rules, in the order of the file.
func (c *controller) ruleStatuses() []RuleStatus {
	c.mu.Lock()
	defer c.mu.Unlock()
	var statuses []RuleStatus
	for _, r := range c.rules.Rules() {
		s := RuleStatus{Rule: r.Name, DryRun: r.DryRun}
		if fault, has := c.faults[r.Name]; has {
			s.LastFault = &fault
		}
		statuses = append(statuses, s)
	}
	now := time.Now()
	for _, t := range c.types {
		if t.rules != nil {
			t.addRuleCounts(statuses, now)
		}
	}
	return statuses
}

// addRuleCounts adds the objects of the type to the statuses of the rules by which they expire.
func (t *followedType) addRuleCounts(statuses []RuleStatus, now time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for rule, n := range t.ruleCounts {
		statuses[rule-1].Objects += n
	}
	for _, r := range t.records {
		if verdict := r.verdict; verdict.Rule != 0 && verdict.Problem == 0 && !r.deadline.After(now) {
			statuses[verdict.Rule-1].Overdue++
		}
	}
}
