// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package rules

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
)

var (
	jobs        = policy.Type{GroupVersionResource: schema.GroupVersionResource{Group: "batch", Version: "v1", Resource: "jobs"}, Kind: "Job", Namespaced: true}
	pods        = policy.Type{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "pods"}, Kind: "Pod", Namespaced: true}
	secrets     = policy.Type{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "secrets"}, Kind: "Secret", Namespaced: true}
	deployments = policy.Type{GroupVersionResource: schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}, Kind: "Deployment", Namespaced: true}
	widgets     = policy.Type{GroupVersionResource: schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}, Kind: "Widget", Namespaced: true}
)

// jobRule is the rule r of the specification.
const jobRule = `
- name: r
  resources: [jobs.batch]
  when: "object.?status.conditions.orValue([]).exists(c, c.type == 'Complete' && c.status == 'True')"
  since: timestamp(object.status.completionTime)
  ttl: 1h`

const completedJob = `
status: {succeeded: 1, completionTime: "2030-01-10T10:00:00Z", conditions: [{type: Complete, status: "True"}]}`

var completedAt = time.Date(2030, 1, 10, 10, 0, 0, 0, time.UTC)

func parse(t testing.TB, text string) *Set {
	t.Helper()
	set, err := Parse([]byte("rules:" + text))
	assert.NoError(t, err)
	return set
}

// object returns an object that was created at 8:00, unstructured, and typed if its type is built in.
func object(t testing.TB, typ policy.Type, text string) (objects []metav1.Object) {
	t.Helper()
	untyped := &unstructured.Unstructured{}
	assert.NoError(t, yaml.Unmarshal([]byte(text), &untyped.Object))
	if untyped.Object == nil {
		untyped.Object = map[string]any{}
	}
	untyped.SetGroupVersionKind(typ.GroupVersion().WithKind(typ.Kind))
	untyped.SetName("x")
	if untyped.GetNamespace() == "" {
		untyped.SetNamespace("shop")
	}
	untyped.SetCreationTimestamp(metav1.NewTime(completedAt.Add(-2 * time.Hour)))
	objects = append(objects, untyped)
	if typed, err := clientscheme.Scheme.New(typ.GroupVersion().WithKind(typ.Kind)); err == nil {
		assert.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(untyped.Object, typed))
		typed.GetObjectKind().SetGroupVersionKind(schema.GroupVersionKind{}) // as the cache decodes it
		objects = append(objects, typed.(metav1.Object))
	}
	return objects
}

// TestEvaluateDecidesByTheFirstMatch evaluates rules for one object.
func TestEvaluateDecidesByTheFirstMatch(t *testing.T) {
	const temp = `
- {name: temp, resources: ["*"], when: "object.metadata.?namespace.orValue('') == 'temp'", ttl: 1h}`
	controlled := `
metadata: {namespace: temp, ownerReferences: [{apiVersion: v1, kind: X, name: x, uid: "1", controller: true}]}`
	rule := func(typ, rest string) string { return "\n- {name: r, ttl: 1h, resources: [" + typ + "], " + rest + "}" }
	// The file does what kube-cleanup-operator does, and not what that deletes by mistake.
	file := filepath.Join("..", "..", "..", "..", "..", "deploy", "examples", "ttl-rules", "rules.yaml")
	text, err := os.ReadFile(file)
	if _, readErr := Read(file); err != nil || readErr != nil {
		t.Fatal(err, readErr)
	}
	_, example, _ := strings.Cut(string(text), "\nrules:")
	const notReady = `conditions: [{type: Ready, status: "False", lastTransitionTime: "2030-01-10T10:00:00Z"}]`

	for name, tc := range map[string]struct {
		rules, object string
		typ           policy.Type
		rule          string    // that matches
		since         time.Time // if not its creation
		problem       Problem
	}{
		"a Job that is done expires":                             {rules: jobRule, typ: jobs, object: completedJob, rule: "r", since: completedAt},
		"a Job that runs does not expire":                        {rules: jobRule, typ: jobs, object: "status: {active: 1}"},
		"a Job that failed after some successes does not expire": {rules: jobRule, typ: jobs, object: `status: {succeeded: 1, failed: 7, conditions: [{type: Failed, status: "True"}]}`},
		"a field that is missing is a problem":                   {rules: rule("jobs.batch", "when: object.status.x == 1"), typ: jobs, object: completedJob, rule: "r", problem: MissingField},
		"a rule with forever protects from later rules": {rules: "\n- {name: keep, resources: [jobs.batch], when: \"'keep' in object.metadata.?labels.orValue({})\", ttl: forever}" + jobRule,
			typ: jobs, object: "metadata: {labels: {keep: ''}}" + completedJob},
		"a rule with forever does not protect what it does not match": {rules: "\n- {name: keep, resources: [jobs.batch], when: \"'keep' in object.metadata.?labels.orValue({})\", ttl: forever}" + jobRule,
			typ: jobs, object: completedJob, rule: "r", since: completedAt},
		"the first rule that matches decides":                     {rules: jobRule + "\n- {name: later, resources: [jobs.batch], ttl: 1m}", typ: jobs, object: completedJob, rule: "r", since: completedAt},
		"the second rule decides where the first does not match":  {rules: jobRule + "\n- {name: later, resources: [jobs.batch], ttl: 1m}", typ: jobs, rule: "later"},
		"an error decides, whatever later rules say":              {rules: rule("jobs.batch", "when: object.spec.x == 1") + "\n- {name: later, resources: [jobs.batch], ttl: 1m}", typ: jobs, rule: "r", problem: MissingField},
		"a rule for every type matches a Deployment":              {rules: temp, typ: deployments, object: "metadata: {namespace: temp}", rule: "temp"},
		"a rule for every type leaves a controlled Pod alone":     {rules: temp, typ: pods, object: controlled},
		"a rule for every type matches a custom resource":         {rules: temp, typ: widgets, object: "metadata: {namespace: temp}", rule: "temp"},
		"a rule for every type does not match another namespace":  {rules: temp, typ: widgets},
		"a rule for a group matches its types":                    {rules: rule("'*.example.com'", "dryRun: true"), typ: widgets, rule: "r"},
		"a rule for a group does not match another group":         {rules: rule("'*.apps'", "dryRun: true"), typ: widgets},
		"a rule for every type reads owners, labels and creation": {rules: rule("'*'", "when: \"object.metadata.?labels[?'a/b'].orValue('') == 'c' && timestamp(object.metadata.creationTimestamp) > timestamp('2019-04-01T00:00:00Z') && object.metadata.?ownerReferences.orValue([]).all(o, o.kind == 'Team' && !has(o.controller))\""), typ: widgets, object: "metadata: {labels: {a/b: c}, ownerReferences: [{kind: Team, name: x, uid: '1', apiVersion: v1}]}", rule: "r"},
		"a controlled object by a rule that names it":             {rules: rule("pods", "dryRun: false"), typ: pods, object: controlled, rule: "r"},
		"dyn lets nobody read what a rule may not":                {rules: rule("'*'", "when: dyn(object).metadata.annotations.a == 'b'"), typ: widgets, object: "metadata: {annotations: {a: b}}", rule: "r", problem: MissingField},
		"since may be in the future":                              {rules: rule("jobs.batch", "since: timestamp('2030-01-17T10:00:00Z')"), typ: jobs, rule: "r", since: completedAt.Add(7 * 24 * time.Hour)},
		"since with a text that is no time is a problem":          {rules: rule("jobs.batch", "since: timestamp(object.metadata.labels.at)"), typ: jobs, object: "metadata: {labels: {at: yesterday}}", rule: "r", problem: NoTime},
		"since with a text in place of a timestamp is a problem":  {rules: rule("jobs.batch", "since: object.metadata.labels.at"), typ: jobs, object: "metadata: {labels: {at: '2030-01-01'}}", rule: "r", problem: WrongType},
		"since before 1970 matches nothing":                       {rules: rule("jobs.batch", "since: timestamp('1969-12-31T23:59:59Z')"), typ: jobs},
		"since a fraction of a second, which is rounded":          {rules: rule("jobs.batch", "since: timestamp('2030-01-10T09:59:59.000001Z')"), typ: jobs, rule: "r", since: completedAt},
		"when is no boolean, which only its value shows":          {rules: rule("jobs.batch", "when: object.metadata.name"), typ: jobs, rule: "r", problem: WrongType},
		"a comparison of other types":                             {rules: rule("jobs.batch", "when: object.metadata.name > 1"), typ: jobs, rule: "r", problem: WrongType},
		"a division by zero":                                      {rules: rule("jobs.batch", "when: \"1 / size(object.metadata.?labels.orValue({})) > 0\""), typ: jobs, rule: "r", problem: EvaluationFailed},
		"the kind, which the cache drops":                         {rules: rule("jobs.batch", "when: object.kind == 'Job' && object.apiVersion == 'batch/v1'"), typ: jobs, rule: "r"},
		"bytes are text in base64, as in JSON":                    {rules: rule("secrets", "when: object.data.a == 'eA=='"), typ: secrets, object: "data: {a: eA==}", rule: "r"},
		"quantities, numbers and lists":                           {rules: rule("pods", "when: \"quantity(object.spec.containers[0].resources.requests.cpu).isLessThan(quantity('1')) && object.spec.priority == 7\""), typ: pods, object: "spec: {priority: 7, containers: [{name: c, resources: {requests: {cpu: 100m}}}]}", rule: "r"},
		"example: a Job that succeeded":                           {rules: example, typ: jobs, object: completedJob, rule: "jobs-succeeded", since: completedAt},
		"example: an evicted Pod":                                 {rules: example, typ: pods, object: "status: {phase: Failed, reason: Evicted, " + notReady + "}", rule: "pods-evicted", since: completedAt},
		"example: an evicted Pod that never was ready":            {rules: example, typ: pods, object: "status: {phase: Failed, reason: Evicted}", rule: "pods-evicted"},
		"example: a Pod of nobody that is done":                   {rules: example, typ: pods, object: "status: {phase: Succeeded, " + notReady + "}", rule: "pods-orphaned", since: completedAt},
		"example: a Pod of nobody that is not ready":              {rules: example, typ: pods, object: "status: {phase: Running, " + notReady + "}"},
		"example: a Pod of a Job that is done":                    {rules: example, typ: pods, object: "metadata: {ownerReferences: [{kind: Job, name: x, uid: '1', apiVersion: batch/v1}]}\nstatus: {phase: Succeeded, " + notReady + "}"},
		"example: a Pod that nobody has looked at yet":            {rules: example, typ: pods},
		"a type that no rule names":                               {rules: jobRule, typ: pods},
	} {
		t.Run(name, func(t *testing.T) {
			set := parse(t, tc.rules)
			for _, obj := range object(t, tc.typ, tc.object) {
				var got Verdict
				var err error
				if typed := set.ForType(tc.typ); typed != nil {
					got, err = typed.Evaluate(obj)
				}
				want := Verdict{Problem: tc.problem}
				for i, r := range set.Rules() {
					if r.Name == tc.rule {
						want.Rule = uint8(i + 1)
					}
				}
				if want.Rule != 0 && want.Problem == 0 {
					want.Since = completedAt.Add(-2 * time.Hour).Unix()
					if !tc.since.IsZero() {
						want.Since = tc.since.Unix()
					}
				}
				if got != want || (err != nil) != (want.Problem != 0) {
					t.Errorf("%T: %+v, %v; want %+v", obj, got, err, want)
				}
				if decoded := Decode(got.Encode()); decoded != got || len(got.Encode()) > 9 {
					t.Errorf("%+v is kept as %v, which is %+v", got, got.Encode(), decoded)
				}
			}
		})
	}
}

func TestDecideAddsTheTTL(t *testing.T) {
	set := parse(t, jobRule+"\n- {name: dry, resources: [pods], ttl: 1w, dryRun: true}")
	for name, tc := range map[string]struct {
		verdict     Verdict
		explanation string // "" if it is never due
		dryRun      bool
	}{
		"no rule":   {},
		"a problem": {verdict: Verdict{Rule: 1, Problem: MissingField}},
		"a rule":    {Verdict{Rule: 1, Since: completedAt.Unix()}, "rule r, since 2030-01-10T10:00:00Z, ttl 1h, due at 2030-01-10T11:00:00Z", false},
		"a dry run": {Verdict{Rule: 2, Since: completedAt.Unix()}, "rule dry, since 2030-01-10T10:00:00Z, ttl 1w, due at 2030-01-17T10:00:00Z", true},
	} {
		d := set.Decide(tc.verdict)
		if never := d.Deadline.Equal(policy.Never) && d.Rule == ""; never != (tc.explanation == "") || !never && d.Explanation() != tc.explanation || d.DryRun != tc.dryRun {
			t.Errorf("%s: %+v, want %s", name, d, tc.explanation)
		}
	}
}

// TestParseListsEveryMistake has files with mistakes, and what the error names.
func TestParseListsEveryMistake(t *testing.T) {
	rule := func(fields string) string { return "rules:\n- {name: r, resources: [pods], ttl: 1h, " + fields + "}" }
	item := func(resource string) string { return "rules: [{name: r, ttl: 1h, resources: ['" + resource + "']}]" }
	for name, tc := range map[string]struct {
		text string
		want []string // parts of the error; none if there is none
	}{
		"an empty list of rules":                                {text: "# nothing\n---\nrules: []\n"},
		"every field":                                           {text: rule("when: 'true', since: timestamp(object.metadata.creationTimestamp), dryRun: true")},
		"a list that is not indented":                           {text: "rules:\n- name: r\n  resources: [pods]\n  ttl: 1h\n- name: s\n  resources: [pods]\n  ttl: forever\n"},
		"a built-in type":                                       {text: item("ingresses.networking.k8s.io")},
		"another type":                                          {text: item("widgets.v1.example.com")},
		"a built-in type with its version":                      {text: item("jobs.v1.batch")},
		"every type":                                            {text: item("*")},
		"every type of a group":                                 {text: item("*.example.com")},
		"a mistake in CEL fails the start":                      {text: rule("when: object.a ="), want: []string{"rule r: when: 1:10"}},
		"another variable than object fails the start":          {text: rule("when: oldObject.a == 1"), want: []string{"rule r: when: 1:1", "oldObject"}},
		"the function now fails the start":                      {text: rule("since: now()"), want: []string{"rule r: since", "now"}},
		"a when that is a string fails the start":               {text: rule("when: \"'true'\""), want: []string{"rule r: when: is of type string, not bool"}},
		"a since that is a string fails the start":              {text: rule("since: \"'2030-01-01'\""), want: []string{"rule r: since: is of type string, not"}},
		"an unknown field of a rule fails the start":            {text: "rules: [{wen: 'true', name: r, resources: [pods], ttl: 1h}]", want: []string{"rule r", `"wen"`}},
		"an unknown field of the file fails the start":          {text: "rule: []", want: []string{`"rule"`}},
		"an unknown type fails the start":                       {text: item("jobs"), want: []string{"rule r: resources", `"jobs"`, "widgets.v1.example.com"}},
		"a custom resource without its version fails the start": {text: item("widgets.example.com"), want: []string{"rule r: resources"}},
		"a wildcard in the name of a type fails the start":      {text: item("po*"), want: []string{"rule r: resources"}},
		"two rules of one name fail the start":                  {text: "rules: [{name: r, resources: [pods], ttl: 1h}, {name: r, resources: [pods], ttl: 1h}]", want: []string{"rule r: name"}},
		"two mistakes":                                          {text: "rules: [{name: r, resources: [pods], ttl: 1x}, {name: s, ttl: 1h}]", want: []string{"rule r: ttl", "rule s: resources: is missing"}},
		"a key twice":                                           {text: "rules: []\nrules: []", want: []string{"rules"}},
		"a second document":                                     {text: "rules: []\n---\nrules: []", want: []string{"single document"}},
		"a name in capitals":                                    {text: "rules: [{name: R, resources: [pods], ttl: 1h}]", want: []string{"rule R: name"}},
		"a name that is too long":                               {text: "rules: [{name: " + strings.Repeat("r", 64) + ", resources: [pods], ttl: 1h}]", want: []string{"name"}},
		"no ttl":                                                {text: "rules: [{name: r, resources: [pods]}]", want: []string{"rule r: ttl: is missing"}},
		"a negative ttl":                                        {text: "rules: [{name: r, resources: [pods], ttl: -1h}]", want: []string{"rule r: ttl", "negative"}},
		"two versions of a type":                                {text: "rules: [{name: r, resources: [widgets.v1.example.com], ttl: 1h}, {name: s, resources: [widgets.v2.example.com], ttl: 1h}]", want: []string{"rule s: resources"}},
		"a rule for every type may not read spec":               {text: "rules: [{name: r, resources: ['*'], ttl: 1h, when: has(object.spec)}]", want: []string{"rule r: when", "spec", "metadata.name"}},
		"a rule for a group may not read uid":                   {text: "rules: [{name: r, resources: ['*.apps'], ttl: 1h, since: timestamp(object.metadata.uid)}]", want: []string{"rule r: since", "uid"}},
		"a rule for every type may not read spec by an index":   {text: "rules: [{name: r, resources: ['*'], ttl: 1h, when: \"object['spec'] == 1\"}]", want: []string{"rule r: when"}},
		"an expression that is too long":                        {text: rule("when: \"'" + strings.Repeat("x", 4<<10) + "' == ''\""), want: []string{"rule r: when", "4096"}},
		"a text that grows without limit":                       {text: rule("when: \"object.a.replace('', object.b) == ''\""), want: []string{"rule r: when", "replace"}},
		"such a function within a loop":                         {text: rule("when: \"object.a.exists(x, sets.contains(x, object.b))\""), want: []string{"rule r: when", "sets.contains"}},
		"a pattern of a tenant":                                 {text: rule("when: object.a.matches(object.b)"), want: []string{"rule r: when", "literal"}},
		"a pattern of a tenant, as a function":                  {text: rule("when: \"matches(object.a, object.b)\""), want: []string{"rule r: when", "literal"}},
		"a pattern of the file":                                 {text: rule("when: object.metadata.name.matches('^a+$')")},
		"a pattern that is no pattern":                          {text: rule("when: object.metadata.name.matches('(')"), want: []string{"rule r: when"}},
		"rules that are no list":                                {text: "rules: {a: b}", want: []string{"rules"}},
		"a rule that is no map":                                 {text: "rules: [1]", want: []string{"rule number 1"}},
		"too many rules":                                        {text: "rules: [" + strings.Repeat("{},", 101) + "]", want: []string{"101 rules"}},
		"a file of over 1 MiB":                                  {text: "# " + strings.Repeat("x", 1<<20), want: []string{"1 MiB"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := Parse([]byte(tc.text))
			if (err != nil) != (len(tc.want) > 0) {
				t.Fatal(err)
			}
			for _, part := range tc.want {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q has no %q", err, part)
				}
			}
		})
	}
	if set := parse(t, jobRule); len(set.Rules()) != 1 || set.ForType(jobs) == nil || !set.ForType(jobs).NeedsWhole || set.ForType(pods) != nil {
		t.Error("the rules are not those of the file")
	}
	if set, err := Parse(nil); set != nil || err != nil || set.ForType(jobs) != nil || set.MissingTypes([]policy.Type{jobs}) != nil {
		t.Errorf("%v, %v", set, err)
	}
}

// TestRulesResolveTheirTypes has how rules name types.
func TestRulesResolveTheirTypes(t *testing.T) {
	set := parse(t, `
- {name: a, ttl: 1h, resources: [jobs.batch, widgets.v1.example.com, nodes]}
- {name: b, ttl: 1h, resources: ["*"]}
- {name: c, ttl: 1h, resources: ["*.apps", "*.gone.example.com"]}`)
	other := widgets
	other.Version = "v2"
	if got := set.PinVersion(other); got != widgets {
		t.Errorf("%v, want the version of the rule", got)
	}
	if got := set.PinVersion(jobs); got != jobs {
		t.Error(got)
	}
	want := "[nodes of the rule a *.gone.example.com of the rule c]"
	if got := fmt.Sprint(set.MissingTypes([]policy.Type{jobs, widgets, deployments})); got != want {
		t.Errorf("%s, want %s", got, want)
	}
	for typ, want := range map[policy.Type]string{jobs: "[1 2] true", pods: "[2] false", deployments: "[2 3] false"} {
		typed := set.ForType(typ)
		if got := fmt.Sprintf("%d %t", typed.rules, typed.NeedsWhole); got != want {
			t.Errorf("%s: %s, want %s", typ.Resource, got, want)
		}
	}
}

// hostileObject returns an object of about 1.5 MiB, with lists of 10,000 items, a map as large and a long
// text.
func hostileObject() *unstructured.Unstructured {
	list, keys := make([]any, 10_000), map[string]any{}
	for i := range list {
		list[i] = fmt.Sprintf("%060d", i)
		keys[fmt.Sprint(i)] = "x"
	}
	return &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": "x", "namespace": "shop", "creationTimestamp": "2030-01-10T08:00:00Z"},
		"spec":     map[string]any{"a": list, "b": list, "keys": keys, "long": strings.Repeat("x", 500_000)},
	}}
}

// TestHostileObjectsEndAnEvaluation has objects that make ordinary expressions expensive.
func TestHostileObjectsEndAnEvaluation(t *testing.T) {
	limits := []Problem{TooCostly, TooSlow} // a slow machine may reach the limit of time first
	for name, tc := range map[string]struct {
		when string
		want []Problem
	}{
		"nested loops over a tenant's lists reach the limit": {"object.spec.a.exists(x, object.spec.b.exists(y, x == y + 'z'))", limits},
		"a loop within a loop over keys":                     {"object.spec.keys.all(x, object.spec.keys.exists(y, true))", limits},
		"a long text that is compared each time":             {"object.spec.a.exists(x, x == object.spec.long)", limits},
		"a pattern on a long text":                           {"object.spec.long.matches('(a|b|x)+y')", limits},
		"a text that is read as a time":                      {"timestamp(object.spec.long) > timestamp('2030-01-01T00:00:00Z')", []Problem{EvaluationFailed}},
	} {
		t.Run(name, func(t *testing.T) {
			set := parse(t, "\n- {name: r, resources: [widgets.v1.example.com], ttl: 1h, when: \""+tc.when+"\"}")
			obj := hostileObject()
			begin := time.Now()
			v, err := set.ForType(widgets).Evaluate(obj)
			t.Logf("%v after %v: %.100v", v.Problem, time.Since(begin), err)
			if v.Rule != 1 || !slices.Contains(tc.want, v.Problem) {
				t.Errorf("%v, %.200v; want one of %v", v.Problem, err, tc.want)
			}
		})
	}
}

// TestAllRulesTogetherHaveALimit has rules of which none costs too much alone.
func TestAllRulesTogetherHaveALimit(t *testing.T) {
	var text strings.Builder
	for i := range 20 {
		fmt.Fprintf(&text, "\n- {name: r%d, resources: [widgets.v1.example.com], ttl: 1h, when: \"object.spec.a.exists(x, x == 'none%d')\"}", i, i)
	}
	obj := hostileObject()
	obj.Object["spec"].(map[string]any)["a"] = obj.Object["spec"].(map[string]any)["a"].([]any)[:1000]
	// In a bubble no time passes during the evaluation, so that on a busy machine too the cost ends it.
	synctest.Test(t, func(t *testing.T) {
		v, err := parse(t, text.String()).ForType(widgets).Evaluate(obj)
		if v.Problem != TooCostly || v.Rule < 2 || v.Rule > 6 {
			t.Errorf("%+v, %v", v, err)
		}
	})
}

// TestNoValueIsRetained searches the heap for a value of a Secret that rules have read.
func TestNoValueIsRetained(t *testing.T) {
	if testing.Short() {
		t.Skip("writes a heap dump")
	}
	value := func(i int) string { // computed, so that it is nowhere else
		sum := sha256.Sum256([]byte{byte(i)})
		return hex.EncodeToString(sum[:])
	}
	set := parse(t, "\n- {name: r, resources: [secrets], ttl: 1h, when: \"object.stringData.exists(k, object.stringData[k].startsWith('x'))\"}\n"+
		"- {name: s, resources: [secrets], ttl: 1h, when: \"object.data.b != ''\", since: \"timestamp(object.stringData[object.stringData.a])\"}")
	typed := set.ForType(secrets)
	kept := value(250)
	for i := range 10 {
		for _, obj := range object(t, secrets, fmt.Sprintf("stringData: {a: %s}\ndata: {b: %s}", value(i), base64.StdEncoding.EncodeToString([]byte(value(100+i))))) {
			v, err := typed.Evaluate(obj)
			if v.Problem != MissingField || !strings.Contains(err.Error(), value(i)) {
				t.Fatal(v, err)
			}
		}
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "heap"))
	assert.NoError(t, err)
	defer file.Close()
	for range 3 { // pools survive one collection
		goruntime.GC()
	}
	debug.WriteHeapDump(file.Fd())
	dump, err := os.ReadFile(file.Name())
	assert.NoError(t, err)
	if !bytes.Contains(dump, []byte(kept)) {
		t.Fatal("the dump does not even hold what is kept: the search proves nothing")
	}
	for i := range 10 {
		for _, text := range []string{value(i), value(100 + i), base64.StdEncoding.EncodeToString([]byte(value(100 + i)))} {
			if n := bytes.Count(dump, []byte(text)); n > 0 {
				t.Fatalf("a value of Secret %d is in the heap dump %d times", i, n)
			}
		}
	}
	goruntime.KeepAlive(kept)
}
