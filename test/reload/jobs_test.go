// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package reload

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

func controlledBy(cronJob *unstructured.Unstructured) metav1.OwnerReference {
	return metav1.OwnerReference{APIVersion: "batch/v1", Kind: "CronJob", Name: cronJob.GetName(), UID: cronJob.GetUID(), Controller: ptr.To(true)}
}

// waitForReplacement waits until another Job has taken the place of the one with the UID before.
func (s testNamespace) waitForReplacement(job string, oldUID types.UID) {
	s.t.Helper()
	s.eventually(func() error {
		client, name := s.client(job)
		o, err := client.Get(s.t.Context(), name, metav1.GetOptions{})
		if err == nil && o.GetUID() == oldUID {
			err = errors.New("the Job is the old one")
		}
		return err
	})
}

func jobScenarios() map[string]scenario {
	const job, cron = "jobs/import", "cronjobs/report"
	source := func(s testNamespace) { s.configMap("app-config", "blue") }
	waitForJobs := func(s testNamespace, n int) {
		s.t.Helper()
		s.eventually(func() error {
			if got := s.list("jobs"); len(got) != n {
				return fmt.Errorf("Jobs %v, want %d", got, n)
			}
			return nil
		})
	}
	return map[string]scenario{
		"a Job is replaced, and what changes while no manager runs does not run it again": {
			given: func(s testNamespace) { source(s); s.create(newJob("import", annotated(auto, "true"), uses(cm))) },
			when: func(s testNamespace) {
				before := s.get(job).GetUID()
				s.configMap("app-config", "red")
				s.waitForReplacement(job, before)
				s.waitForMark(job, cm)
				s.configMap("uid", string(s.get(job).GetUID()))
			},
			whileDown: func(s testNamespace) { s.configMap("app-config", "green") },
			then: func(s testNamespace) {
				want, _, _ := unstructured.NestedString(s.get("configmaps/uid").Object, "data", "content")
				if got := string(s.get(job).GetUID()); got != want {
					s.t.Errorf("the Job is another one than before the restart")
				}
			},
		},
		"a finished Job runs again": {
			given: func(s testNamespace) {
				source(s)
				j := newJob("import", annotated(auto, "true"), uses(cm))
				j.Spec.Completions = ptr.To[int32](0) // so that its controller completes it at once
				s.create(j)
			},
			when: func(s testNamespace) {
				s.eventually(func() error {
					if _, finished, _ := unstructured.NestedString(s.get(job).Object, "status", "completionTime"); !finished {
						return errors.New("the Job has not finished")
					}
					return nil
				})
				before := s.get(job).GetUID()
				s.configMap("app-config", "red")
				s.waitForReplacement(job, before)
				s.waitForMark(job, cm)
			},
		},
		"a CronJob runs once for each change, also for one that was made while no manager ran": {
			given: func(s testNamespace) { source(s); s.create(newCronJob("report", annotated(auto, "true"), uses(cm))) },
			when: func(s testNamespace) {
				s.waitForState(cron, cm)
				s.configMap("app-config", "red")
				waitForJobs(s, 1)
				s.waitForState(cron, cm)
				run := s.get("jobs/" + s.list("jobs")[0])
				assert.Equal(s.t, "owners", []metav1.OwnerReference{controlledBy(s.get(cron))}, run.GetOwnerReferences())
				if got := run.GetAnnotations()["cronjob.kubernetes.io/instantiate"]; got != "manual" {
					s.t.Errorf("instantiate %q", got)
				}
				s.waitForMark("jobs/"+run.GetName(), cm)
			},
			whileDown: func(s testNamespace) { s.configMap("app-config", "green") },
			then: func(s testNamespace) {
				s.waitForState(cron, cm)
				waitForJobs(s, 2)
				s.configMap("app-config", "red") // there is a Job for this data already
				waitForJobs(s, 3)
				s.waitForState(cron, cm)
			},
		},
		"a suspended CronJob runs when the source is named, and else is skipped": {
			given: func(s testNamespace) {
				source(s)
				for name, annotations := range map[string]map[string]string{"report": annotated(auto, "true"), "named": annotated(configMapReload, "app-config")} {
					c := newCronJob(name, annotations, uses(cm))
					c.Spec.Suspend = ptr.To(true)
					s.create(c)
				}
			},
			when: func(s testNamespace) {
				s.waitForState(cron, cm)
				s.waitForState("cronjobs/named", cm)
				s.configMap("app-config", "red")
				s.waitForEvent(cron, "ReloadSkipped", 1)
				s.waitForState(cron, cm)
				s.waitForState("cronjobs/named", cm)
				waitForJobs(s, 1)
			},
			then: func(s testNamespace) { waitForJobs(s, 1) },
		},
		"a CronJob that forbids concurrency waits for the previous reload's Job, which its controller does not count": {
			given: func(s testNamespace) {
				source(s)
				recreateWeb(s)
				c := newCronJob("report", annotated(configMapReload, "app-config"), uses(cm))
				c.Spec.ConcurrencyPolicy = batchv1.ForbidConcurrent
				s.create(c)
			},
			when: func(s testNamespace) {
				s.waitForState(cron, cm)
				s.waitForState(web, cm)
				changeColor(s, "red")
				waitForJobs(s, 1)
				s.waitForState(cron, cm)
				first := s.list("jobs")[0]
				changeColor(s, "green") // rolls the Deployment, without waiting
				s.waitForEvent(cron, "ReloadWaits", 1)
				waitForJobs(s, 1)
				if hash := s.hash(cm); strings.Contains(s.annotation(cron, fleet.StateAnnotation), hash[:16]) {
					s.t.Error("the change is recorded before the Job has run for it")
				}
				s.delete("jobs/" + first)
				waitForJobs(s, 1)
				s.waitForState(cron, cm)
				s.waitForMark("jobs/"+s.list("jobs")[0], cm)
			},
			rolled: map[string]int{web: 2},
		},
		"a Job of a CronJob is left alone": {
			given: func(s testNamespace) {
				source(s)
				recreateWeb(s)
				s.create(newCronJob("report", nil, uses(cm)))
				j := newJob("import", annotated(auto, "true"), uses(cm))
				j.OwnerReferences = []metav1.OwnerReference{controlledBy(s.get(cron))}
				s.create(j)
			},
			when: func(s testNamespace) {
				s.waitForState(web, cm)
				before := s.get(job).GetUID()
				changeColor(s, "red")
				if s.get(job).GetUID() != before {
					s.t.Error("the Job was replaced")
				}
			},
			rolled: map[string]int{web: 1},
		},
	}
}

// TestLongCronJobRunNeedsNoList has a CronJob that forbids concurrency.
func TestLongCronJobRunNeedsNoList(t *testing.T) {
	ctx := fleet.Context(t)
	begin := time.Now()
	s := newTestNamespace(t, nil)
	const cron = "cronjobs/report"
	s.configMap("app-config", "blue")
	c := newCronJob("report", annotated(configMapReload, "app-config"), uses(cm))
	c.Spec.ConcurrencyPolicy = batchv1.ForbidConcurrent
	s.create(c)
	shared.RunLeader(ctx, t, immediateArgs()...)
	s.waitForState(cron, cm)
	s.configMap("app-config", "red")
	s.waitForState(cron, cm)
	first := s.list("jobs")
	s.configMap("app-config", "green")
	s.waitForEvent(cron, "ReloadWaits", 1)
	if len(first) != 1 {
		t.Fatalf("Jobs %v, want one", first)
	}
	s.delete("jobs/" + first[0])
	s.waitForState(cron, cm)
	if got := s.list("jobs"); len(got) != 1 || got[0] == first[0] {
		t.Errorf("Jobs %v, want one that is not %v", got, first)
	}
	for _, e := range shared.AuditSince(t, begin, func(e auditv1.Event) bool {
		return e.Verb == "list" && e.ObjectRef != nil && e.ObjectRef.Namespace == s.namespace && strings.HasSuffix(e.UserAgent, "/config-reload")
	}) {
		t.Errorf("a reload lists a namespace: %s", e.RequestURI)
	}
}
