// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"context"
	"encoding/binary"
	"errors"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/types"
	"github.com/google/cel-go/common/types/ref"
	"github.com/google/cel-go/interpreter"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/cel/common"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

// maxTime is a limit for what CEL does not count as cost, such as the length of texts that a loop compares.
// CEL looks at the clock only every stepsPerClockCheck steps of a loop. The limit is longer than a process
// waits for its share of a CPU.
const maxTime = 250 * time.Millisecond

// Problem is why a rule does not let an object expire. It names nothing of the object, which may be a
// Secret.
type Problem uint8

// The problems.
const (
	_ Problem = iota
	TooCostly
	TooSlow
	MissingField
	WrongType
	NoTime
	EvaluationFailed
)

// String returns the problem as part of a sentence about a rule.
func (p Problem) String() string {
	return [...]string{
		"", "costs more than 20000", "takes longer than 250ms", "reads a field that the object lacks",
		"finds a value of another type", "has a since that is no time", "cannot be evaluated",
	}[p]
}

// Verdict is what the rules say of an object.
type Verdict struct {
	// Rule is the number of the rule that decides, from 1 on in the order of the file. 0 is no rule.
	Rule uint8
	// Problem is why the rule cannot decide, so that the object does not expire.
	Problem Problem
	// Since is when the time of the rule begins, in seconds since 1970.
	Since int64
}

// Encode returns the verdict in nine bytes at most, none for no rule.
func (v Verdict) Encode() []byte {
	switch {
	case v.Rule == 0:
		return nil
	case v.Problem != 0:
		return []byte{v.Rule, byte(v.Problem)}
	}
	return binary.BigEndian.AppendUint64([]byte{v.Rule}, uint64(v.Since))
}

// Decode is the reverse of Encode.
func Decode(b []byte) (v Verdict) {
	switch len(b) {
	case 2:
		v = Verdict{Rule: b[0], Problem: Problem(b[1])}
	case 9:
		v = Verdict{Rule: b[0], Since: int64(binary.BigEndian.Uint64(b[1:]))}
	}
	return v
}

// RuleOf returns the rule that decides. There must be one.
func (s *Set) RuleOf(v Verdict) *Rule { return &s.rules[v.Rule-1] }

// Decide returns what becomes of an object with the verdict.
func (s *Set) Decide(v Verdict) policy.Decision {
	if v.Rule == 0 || v.Problem != 0 {
		return policy.Decision{Deadline: policy.Never}
	}
	r, since := s.RuleOf(v), time.Unix(v.Since, 0)
	return policy.Decision{Deadline: since.Add(r.ttl), Rule: r.Name, Value: r.TTL, Since: since, DryRun: r.DryRun}
}

// TypeRules are the rules for the objects of one type.
type TypeRules struct {
	typ   policy.Type
	set   *Set
	rules []uint8 // the numbers of the rules, as in Verdict
	// NeedsWhole says that a rule reads more than the metadata.
	NeedsWhole bool
}

// ForType returns the rules for the objects of a type, nil if there are none.
func (s *Set) ForType(t policy.Type) *TypeRules {
	typeRules := &TypeRules{typ: t, set: s}
	for i, r := range s.Rules() {
		if slices.ContainsFunc(r.resources, func(item schema.GroupVersionResource) bool { return itemMatches(item, t) }) {
			typeRules.rules = append(typeRules.rules, uint8(i+1))
			typeRules.NeedsWhole = typeRules.NeedsWhole || !r.wildcard
		}
	}
	if len(typeRules.rules) == 0 {
		return nil
	}
	return typeRules
}

// Evaluate returns the verdict of the first rule that matches an object, or that cannot be evaluated; the
// error, which may have values of the object, says more about a problem. The object must be a whole one if
// NeedsWhole is set. Evaluate does not change it. Objects with a controller are deleted with the controller,
// so rules for every type leave them alone.
func (t *TypeRules) Evaluate(obj metav1.Object) (Verdict, error) {
	ctx, cancel := context.WithTimeout(context.Background(), maxTime)
	defer cancel()
	e := &evaluation{ctx: ctx, rules: t, obj: obj}
	for _, number := range t.rules {
		rule := &t.set.rules[number-1]
		if rule.wildcard && metav1.GetControllerOfNoCopy(obj) != nil {
			continue
		}
		if rule.when != nil {
			matched, err := evaluate[types.Bool](e, rule, rule.when)
			if err != nil {
				return Verdict{Rule: number, Problem: problemOf(err, EvaluationFailed)}, err
			}
			if !matched {
				continue
			}
		}
		if rule.forever {
			return Verdict{}, nil
		}
		since := obj.GetCreationTimestamp().Time
		if rule.since != nil {
			value, err := evaluate[types.Timestamp](e, rule, rule.since)
			if err != nil {
				return Verdict{Rule: number, Problem: problemOf(err, NoTime)}, err
			}
			since = value.Time
		}
		if since.Unix() < 0 {
			return Verdict{}, nil // before 1970, like an absent creationTimestamp: the field has another meaning
		}
		return Verdict{Rule: number, Since: since.Add(time.Second - 1).Unix()}, nil // rounded up
	}
	return Verdict{}, nil
}

// evaluation is the evaluation of the rules for one object.
type evaluation struct {
	ctx             context.Context
	rules           *TypeRules
	obj             metav1.Object
	cost            uint64
	whole, metadata map[string]any // made when they are first read
}

var (
	errCost = errors.New("all rules of the object together cost too much")
	errType = errors.New("the value has another type")
)

// evaluate evaluates an expression of a rule.
func evaluate[T ref.Val](e *evaluation, r *Rule, program cel.Program) (result T, err error) {
	value, details, err := program.ContextEval(e.ctx, e.input(r))
	if cost := details.ActualCost(); cost != nil {
		e.cost += *cost
	}
	if err != nil {
		return result, err
	}
	if e.cost > maxCost {
		return result, errCost
	}
	result, ok := value.(T)
	if !ok {
		return result, errType
	}
	return result, nil
}

// problemOf returns the problem of an expression that failed; fallback, if nothing else is known.
func problemOf(err error, fallback Problem) Problem {
	var cancelled interpreter.EvalCancelledError
	switch {
	case errors.Is(err, errCost), errors.As(err, &cancelled) && cancelled.Cause == interpreter.CostLimitExceeded:
		return TooCostly
	case errors.Is(err, interpreter.InterruptError{}):
		return TooSlow
	case strings.HasPrefix(err.Error(), "no such key"):
		return MissingField
	case errors.Is(err, errType), strings.HasPrefix(err.Error(), "no such overload"):
		return WrongType
	}
	return fallback
}

// input returns what the expressions of a rule read.
func (e *evaluation) input(r *Rule) map[string]any {
	if r.wildcard {
		if e.metadata == nil {
			e.metadata = map[string]any{"object": map[string]any{"metadata": common.SchemalessTypedToVal(&metav1.ObjectMeta{
				Name: e.obj.GetName(), Namespace: e.obj.GetNamespace(), Labels: e.obj.GetLabels(),
				OwnerReferences: e.obj.GetOwnerReferences(), CreationTimestamp: e.obj.GetCreationTimestamp()})}}
		}
		return e.metadata
	}
	if e.whole == nil {
		e.whole = map[string]any{"object": e.rules.value(e.obj)}
	}
	return e.whole
}

// value returns a whole object as expressions see it: as JSON, with its kind, which typed objects lack.
func (t *TypeRules) value(obj metav1.Object) any {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return u.Object
	}
	shallow := reflect.New(reflect.TypeOf(obj).Elem())
	shallow.Elem().Set(reflect.ValueOf(obj).Elem())
	shallow.Interface().(runtime.Object).GetObjectKind().SetGroupVersionKind(t.typ.GroupVersion().WithKind(t.typ.Kind))
	return common.SchemalessTypedToVal(shallow.Interface())
}
