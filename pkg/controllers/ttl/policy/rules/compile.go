// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	apiservercel "k8s.io/apiserver/pkg/cel"
	"k8s.io/apiserver/pkg/cel/environment"
)

const (
	// maxCost limits the cost of all expressions for an object, as CEL counts it: 3,000 steps of a
	// loop, about 20 ms. The time that cel-go takes to count grows with the square of the steps, so
	// that 100,000 would take 0.5 s.
	maxCost = 20_000
	// stepsPerClockCheck is how many steps of loops are taken between two looks at the clock.
	stepsPerClockCheck = 10
)

// slowFunctions take time or memory in proportion to the product of two texts or lists, which a tenant may
// have written. CEL counts the cost of a call only after the call has returned.
var slowFunctions = []string{
	"distinct", "flatten", "indexOf", "join", "lastIndexOf", "replace", "sets.contains", "sets.equivalent", "sets.intersects",
}

// patternFunctions are functions that are slow with a regular expression of a tenant.
var patternFunctions = []string{"matches", "find", "findAll"}

// compiler compiles expressions. It has the functions that a ValidatingAdmissionPolicy has.
type compiler struct {
	whole    *cel.Env // object is anything
	metadata *cel.Env // object has the metadata that rules for every type may read
}

// readableFields names the only fields that rules for every type may read: objects of every type have them.
const readableFields = "metadata.name, namespace, labels, ownerReferences and creationTimestamp"

func newCompiler() (*compiler, error) {
	// The library keeps one environment for each version. The authorizer of the secure port uses the same one.
	base := environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()).StoredExpressionsEnv()
	wholeEnv, err := base.Extend(cel.Variable("object", cel.DynType))
	if err != nil {
		return nil, err
	}
	newObjectType := func(name string, fields map[string]*apiservercel.DeclType) *apiservercel.DeclType {
		declFields := map[string]*apiservercel.DeclField{}
		for name, fieldType := range fields {
			declFields[name] = apiservercel.NewDeclField(name, fieldType, false, nil, nil)
		}
		return apiservercel.NewObjectType(name, declFields)
	}
	// No expression has a variable or a type of these names.
	text, boolean := apiservercel.StringType, apiservercel.BoolType
	owner := newObjectType("rules.Owner", map[string]*apiservercel.DeclType{
		"apiVersion": text, "kind": text, "name": text, "uid": text, "controller": boolean, "blockOwnerDeletion": boolean})
	metadata := newObjectType("rules.Metadata", map[string]*apiservercel.DeclType{
		"name": text, "namespace": text, "creationTimestamp": text, "labels": apiservercel.NewMapType(text, text, -1),
		"ownerReferences": apiservercel.NewListType(owner, -1)})
	object := newObjectType("rules.Object", map[string]*apiservercel.DeclType{"metadata": metadata})
	options, err := apiservercel.NewDeclTypeProvider(object, metadata, owner).EnvOptions(base.CELTypeProvider())
	if err != nil {
		return nil, err
	}
	metadataEnv, err := base.Extend(append(options, cel.Variable("object", object.CelType()))...)
	return &compiler{wholeEnv, metadataEnv}, err
}

// compile compiles the expressions of a rule.
func (r *Rule) compile(c *compiler, bad func(field, format string, args ...any)) {
	for _, expression := range []struct {
		field, text string
		want        *cel.Type
		program     *cel.Program
	}{{"when", r.When, cel.BoolType, &r.when}, {"since", r.Since, cel.TimestampType, &r.since}} {
		if strings.TrimSpace(expression.text) == "" {
			continue
		}
		env, hint := c.whole, ""
		if r.wildcard {
			env, hint = c.metadata, "; a rule for every type reads "+readableFields
		}
		program, err := compileExpression(env, expression.text, expression.want)
		if err != nil {
			bad(expression.field, "%v%s", err, hint)
		}
		*expression.program = program
	}
}

// compileExpression compiles an expression whose value has the wanted type.
func compileExpression(env *cel.Env, text string, want *cel.Type) (cel.Program, error) {
	if len(text) > maxExpression {
		return nil, fmt.Errorf("is longer than %d bytes", maxExpression)
	}
	compiled, issues := env.Compile(text)
	if issues.Err() != nil {
		var messages []string
		for _, issue := range issues.Errors() {
			messages = append(messages, fmt.Sprintf("%d:%d: %s", issue.Location.Line(), issue.Location.Column()+1, issue.Message))
		}
		return nil, errors.New(strings.Join(messages, "; "))
	}
	if outputType := compiled.OutputType(); !outputType.IsExactType(want) && !outputType.IsExactType(cel.DynType) {
		return nil, fmt.Errorf("is of type %s, not %s", outputType, want)
	}
	if err := checkCalls(compiled); err != nil {
		return nil, err
	}
	return env.Program(compiled, cel.CostLimit(maxCost), cel.InterruptCheckFrequency(stepsPerClockCheck))
}

// checkCalls returns an error if a call can take so long that no limit of the cost holds.
func checkCalls(compiled *cel.Ast) (err error) {
	ast.PreOrderVisit(compiled.NativeRep().Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if e.Kind() != ast.CallKind {
			return
		}
		call := e.AsCall()
		name, args := call.FunctionName(), call.Args()
		switch {
		case slices.Contains(slowFunctions, name):
			err = fmt.Errorf("%s is not allowed, because its time is not limited", name)
		case slices.Contains(patternFunctions, name):
			if call.IsMemberFunction() {
				args = append([]ast.Expr{call.Target()}, args...)
			}
			if len(args) > 1 && args[1].Kind() != ast.LiteralKind {
				err = fmt.Errorf("the pattern of %s must be a literal", name)
			}
		}
	}))
	return err
}
