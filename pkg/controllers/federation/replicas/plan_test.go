// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package replicas_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/replicas"
)

// parseNumbers reads numbers by the letter of a cluster, such as "A10 B70".
func parseNumbers(t *testing.T, text string) map[string]int64 {
	t.Helper()
	numbers := map[string]int64{}
	for _, word := range strings.Fields(text) {
		var n int64
		if _, err := fmt.Sscan(word[1:], &n); err != nil {
			t.Fatalf("%s: %v", word, err)
		}
		numbers[word[:1]] = n
	}
	return numbers
}

// formatPlan writes a plan as the tests do: the plans in the order of the clusters, then the overflows.
func formatPlan(clusters []string, plan map[string]replicas.Share) string {
	var plans, overflows []string
	for _, name := range clusters {
		plans = append(plans, fmt.Sprint(plan[name].Plan))
		if n := plan[name].Overflow; n != 0 {
			overflows = append(overflows, fmt.Sprintf("%s%d", name, n))
		}
	}
	return strings.TrimSuffix(strings.Join(plans, " ")+"; "+strings.Join(overflows, " "), "; ")
}

func weight(n int64) replicas.Preference { return replicas.Preference{Weight: n} }

func TestPlanFollowsThePreferences(t *testing.T) {
	equalWeights := map[string]replicas.Preference{replicas.AnyCluster: weight(1)}
	tests := map[string]struct {
		total             int64
		clusters          string
		rebalance         bool
		preferences       map[string]replicas.Preference
		current, capacity string
		key               string
		want              string
	}{
		"equal clusters differ by one":                                {total: 50, clusters: "ABC", preferences: equalWeights, want: "16 17 17"},
		"the key decides where the one is":                            {total: 50, clusters: "ABC", preferences: equalWeights, key: "shop/web", want: "17 17 16"},
		"no preferences are equal weights":                            {total: 50, clusters: "ABC", want: "16 17 17"},
		"running replicas stay":                                       {total: 50, clusters: "ABC", preferences: equalWeights, current: "C30", want: "10 10 30"},
		"running replicas stay up to the total":                       {total: 50, clusters: "AB", preferences: equalWeights, current: "A10 B70", want: "0 50"},
		"running replicas move with rebalance":                        {total: 50, clusters: "AB", preferences: equalWeights, rebalance: true, current: "A10 B70", want: "25 25"},
		"what cannot run overflows":                                   {total: 50, clusters: "ABC", preferences: equalWeights, rebalance: true, capacity: "C10", want: "20 20 10; C7"},
		"what runs nowhere overflows":                                 {total: 60, clusters: "ABC", preferences: map[string]replicas.Preference{"A": weight(1), "B": weight(1)}, capacity: "A10 B10", want: "10 10 0; A20 B20"},
		"overflow is dropped when all replicas run without rebalance": {total: 50, clusters: "ABC", preferences: equalWeights, capacity: "C10", want: "20 20 10"},
		"a minimum without a weight":                                  {total: 50, clusters: "ABC", preferences: map[string]replicas.Preference{replicas.AnyCluster: {Min: 20}}, want: "10 20 20"},
		"a minimum over the capacity":                                 {total: 50, clusters: "ABC", preferences: map[string]replicas.Preference{replicas.AnyCluster: {Min: 20}}, capacity: "B10", want: "20 10 20"},
		"weights, maxima and a capacity": {total: 71, clusters: "ABCD", rebalance: true, capacity: "C10", want: "10 41 10 10; C11", preferences: map[string]replicas.Preference{
			"A": {Weight: 10000, Max: new(int64(10))}, "B": weight(1), "C": {Weight: 1, Max: new(int64(21))}, "D": {Weight: 1, Max: new(int64(10))}}},
		"minima and weights": {total: 9, clusters: "AB", want: "4 5", preferences: map[string]replicas.Preference{
			"A": {Weight: 1, Min: 4, Max: new(int64(6))}, "B": {Weight: 2, Min: 4, Max: new(int64(8))}}},
		"a maximum is stronger than a minimum": {total: 9, clusters: "AB", want: "2 7", preferences: map[string]replicas.Preference{
			"A": {Min: 5, Max: new(int64(2))}, "B": weight(1)}},
		"a cluster without a preference gets nothing": {total: 9, clusters: "AB", preferences: map[string]replicas.Preference{"A": weight(1)}, current: "B5", want: "9 0"},
		"weights of 0 get the minimum alone":          {total: 9, clusters: "AB", preferences: map[string]replicas.Preference{replicas.AnyCluster: {Min: 2}}, want: "2 2"},
		"more than all maxima is not placed":          {total: 9, clusters: "AB", preferences: map[string]replicas.Preference{replicas.AnyCluster: {Weight: 1, Max: new(int64(3))}}, want: "3 3"},
		"a total of 0":                                {total: 0, clusters: "AB", preferences: map[string]replicas.Preference{replicas.AnyCluster: {Weight: 1, Min: 3}}, current: "A5", want: "0 0"},
		"the largest numbers": {total: replicas.MaxNumber, clusters: "AB", want: "1073741823 1073741824",
			preferences: map[string]replicas.Preference{replicas.AnyCluster: weight(replicas.MaxNumber)}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			clusters := strings.Split(tc.clusters, "")
			got := formatPlan(clusters, replicas.Plan(replicas.Input{Total: tc.total, Rebalance: tc.rebalance, Preferences: tc.preferences, Clusters: clusters,
				Current: parseNumbers(t, tc.current), Capacity: parseNumbers(t, tc.capacity), Key: tc.key}))
			if got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}

// randomInput returns any input. Small numbers meet limits more often, large ones may overflow.
func randomInput(r *rand.Rand) replicas.Input {
	bound := []int64{3, 20, 1000, replicas.MaxNumber}[r.IntN(4)]
	number := func() int64 { return r.Int64N(bound + 1) }
	input := replicas.Input{Total: number(), Rebalance: r.IntN(2) == 0, Key: []string{"", "shop/web"}[r.IntN(2)],
		Preferences: map[string]replicas.Preference{}, Current: map[string]int64{}, Capacity: map[string]int64{}}
	clusters := []string{"A", "B", "C", "D", "E", "F"}
	input.Clusters = clusters[:r.IntN(len(clusters)+1)]
	for _, name := range append([]string{replicas.AnyCluster}, input.Clusters...) {
		if r.IntN(3) > 0 {
			p := replicas.Preference{Weight: number() * r.Int64N(2), Min: number() * r.Int64N(2)}
			if r.IntN(2) == 0 {
				p.Max = new(number())
			}
			input.Preferences[name] = p
		}
		if r.IntN(3) == 0 {
			input.Current[name] = number()
		}
		if r.IntN(3) == 0 {
			input.Capacity[name] = number()
		}
	}
	return input
}

// planProblem says what is wrong with a plan, or returns "".
func planProblem(input replicas.Input, plan map[string]replicas.Share) string {
	sum := int64(0)
	for _, name := range input.Clusters {
		share, has := plan[name]
		preference, hasOwn := input.Preferences[name]
		if !hasOwn {
			preference = input.Preferences[replicas.AnyCluster]
		}
		capacity, known := input.Capacity[name]
		sum += share.Plan
		switch {
		case !has:
			return "no share of " + name
		case share.Plan < 0 || share.Overflow < 0:
			return "a negative share of " + name
		case preference.Max != nil && share.Replicas() > *preference.Max:
			return name + " is over its maximum"
		case known && share.Plan > capacity:
			return name + " is over its capacity"
		case !known && share.Overflow > 0:
			return name + " overflows without a capacity"
		}
	}
	if sum > input.Total {
		return "more than the total"
	}
	if len(plan) != len(input.Clusters) {
		return "a share of a cluster that there is not"
	}
	return ""
}

func TestPlansStayWithinTheirLimits(t *testing.T) { checkPlans(t, 100_000) }

func TestLongPlanOfAMillionInputs(t *testing.T) { checkPlans(t, 1_000_000) }

// checkPlans checks what holds for each plan.
func checkPlans(t *testing.T, n int) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	for range n {
		input := randomInput(r)
		plan := replicas.Plan(input)
		if problem := planProblem(input, plan); problem != "" {
			t.Fatalf("%+v\n%s: %s", input, formatPlan(input.Clusters, plan), problem)
		}
		shuffled := input
		shuffled.Clusters = slices.Clone(input.Clusters)
		r.Shuffle(len(shuffled.Clusters), func(i, j int) {
			shuffled.Clusters[i], shuffled.Clusters[j] = shuffled.Clusters[j], shuffled.Clusters[i]
		})
		if shuffledPlan := replicas.Plan(shuffled); !maps.Equal(plan, shuffledPlan) {
			t.Fatalf("%+v\n%s, in another order %s", input, formatPlan(input.Clusters, plan), formatPlan(input.Clusters, shuffledPlan))
		}
	}
}
