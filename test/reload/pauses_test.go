// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"errors"
	"fmt"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// waitForPause waits until web is paused, and returns since when.
func waitForPause(s testNamespace) time.Time {
	s.t.Helper()
	var since time.Time
	s.eventually(func() error {
		o := s.get(web)
		if paused, _, _ := unstructured.NestedBool(o.Object, "spec", "paused"); !paused {
			return errors.New("not paused")
		}
		var err error
		since, err = time.Parse(time.RFC3339, o.GetAnnotations()[pausedAt])
		return err
	})
	return since
}

// waitForResume waits until web is not paused and has no time of a pause.
func waitForResume(s testNamespace) {
	s.t.Helper()
	s.eventually(func() error {
		o := s.get(web)
		paused, _, _ := unstructured.NestedBool(o.Object, "spec", "paused")
		if since := o.GetAnnotations()[pausedAt]; paused || since != "" {
			return fmt.Errorf("paused %v, since %q", paused, since)
		}
		return nil
	})
}

func createPausingWeb(period string) func(s testNamespace) {
	return func(s testNamespace) {
		s.configMap("app-config", "blue")
		s.create(newDeployment("web", annotated(auto, "true", pausePeriod, period), uses(cm)))
	}
}

func changeColorAndPause(s testNamespace) {
	s.waitForState(web, cm)
	changeColor(s, "red")
	waitForPause(s)
}

var pauseScenarios = map[string]scenario{
	"a pause ends after its period, and a change within it does not extend it": {
		given: createPausingWeb("4s"),
		when: func(s testNamespace) {
			s.waitForState(web, cm)
			changeColor(s, "red")
			since := waitForPause(s)
			changeColor(s, "green")
			if laterSince := waitForPause(s); !laterSince.Equal(since) {
				s.t.Errorf("paused since %s, not %s", laterSince, since)
			}
			waitForResume(s)
			if end := time.Now(); end.Before(since.Add(4 * time.Second)) {
				s.t.Errorf("resumed at %s, paused since %s for 4s", end, since)
			}
		},
		rolled: map[string]int{web: 2},
	},
	"a pause that is overdue when the next manager starts ends then": {
		given:     createPausingWeb("1h"),
		when:      changeColorAndPause,
		whileDown: func(s testNamespace) { s.patch(web, `{"metadata":{"annotations":{"`+pausePeriod+`":"1s"}}}`) },
		then:      waitForResume,
		rolled:    map[string]int{web: 1},
	},
	"somebody else's pause is never ended": {
		given: func(s testNamespace) {
			s.configMap("app-config", "blue")
			d := newDeployment("web", annotated(auto, "true", pausePeriod, "1s"), uses(cm))
			d.Spec.Paused = true
			s.create(d)
		},
		when: func(s testNamespace) { s.waitForState(web, cm); changeColor(s, "red") },
		then: func(s testNamespace) {
			changeColor(s, "green")
			if paused, _, _ := unstructured.NestedBool(s.get(web).Object, "spec", "paused"); !paused {
				s.t.Error("resumed")
			}
		},
		rolled: map[string]int{web: 2},
	},
}
