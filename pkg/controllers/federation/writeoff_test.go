// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

// writeOffRecords returns the records of removals that were written off.
func (f *fed) writeOffRecords() (records []policy.WriteOff) {
	f.t.Helper()
	for _, object := range controllertest.List[corev1.ConfigMap](f.Host) {
		if object.Labels[policy.WriteOffLabel] == "" {
			continue
		}
		record, err := policy.ReadWriteOff(object.Name, object.Data)
		if err != nil {
			f.t.Error(err)
		}
		records = append(records, record)
	}
	if n := f.Metric(federation.MetricPrefix + "written_off_removals"); int(n) != len(records) {
		f.t.Errorf("%v removals are written off, and there are %d records", n, len(records))
	}
	return records
}

// deleteDuringOutage cuts c2 off and, a minute later, deletes the federated object.
func (f *fed) deleteDuringOutage() {
	f.t.Helper()
	f.c2.Cut()
	f.Sleep(time.Minute)
	f.Delete(configMap(f.t))
}

// writeOff deletes the federated object while c2 is cut off, and waits until it has been written off.
func (f *fed) writeOff() {
	f.t.Helper()
	f.deleteDuringOutage()
	f.Sleep(5*time.Minute + time.Second)
	f.expectStatus("FederatedConfigMap", "f", "gone")
	if n := len(f.writeOffRecords()); n != 1 {
		f.t.Fatalf("%d records", n)
	}
}

// endOutage lets c2 return.
func (f *fed) endOutage() {
	f.t.Helper()
	f.c2.Restore()
	f.Sleep(time.Minute)
}

// expectNoRecords checks that no record is left.
func (f *fed) expectNoRecords() {
	f.t.Helper()
	if records := f.writeOffRecords(); len(records) > 0 {
		f.t.Errorf("the records %v are left", records)
	}
}

// replacement returns the object in c2 as somebody else has made it at a time.
func (f *fed) replacement(at time.Time) *unstructured.Unstructured {
	f.t.Helper()
	u := f.get(f.c2, "ConfigMap", "shop", "f")
	u.SetUID("")
	u.SetCreationTimestamp(metav1.NewTime(at))
	return u
}

// TestWriteOffRemovesTheObjectLater begins with the federated object in both clusters.
func TestWriteOffRemovesTheObjectLater(t *testing.T) {
	const record = "configmaps " + namespace + "/federation-written-off-"
	for name, tc := range map[string]func(f *fed){
		"F goes after the grace, and its object when c2 is back": func(f *fed) {
			f.deleteDuringOutage()
			f.Sleep(4*time.Minute + 50*time.Second)
			f.expectConfigMap(f.c1, "gone")
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
			f.Writes()
			f.Sleep(11 * time.Second)
			f.expectStatus("FederatedConfigMap", "f", "gone")
			if w := f.Writes(); len(w) != 3 || !strings.HasPrefix(w[0], "create "+record) || w[2] != "patch federatedconfigmaps.types.kubefed.io shop/f" {
				f.t.Errorf("wrote %q, want the record before the finalizer", w)
			}
			if records := f.writeOffRecords(); len(records) != 1 || records[0].UID == "" {
				f.t.Errorf("records %v", records)
			}
			f.Sleep(20 * time.Minute)
			f.endOutage()
			f.expectWrites(f.c2, configMapDelete)
			f.expectNoRecords()
			if events := f.Events(); !slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, "Normal WrittenOff ") }) {
				f.t.Errorf("Events %q", events)
			}
		},
		"F is deleted when c2 has been away for long, and goes after the grace": func(f *fed) {
			f.c2.Cut()
			f.Sleep(20 * time.Minute)
			f.Delete(configMap(f.t))
			f.Sleep(4 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
			f.Sleep(2 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"F is deleted, and c2 is away ever again but never for the grace": func(f *fed) {
			f.change(f.c2, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers([]string{"example.com/mine"}) })
			f.Sleep(time.Minute)
			f.Delete(configMap(f.t))
			for range 5 {
				f.c2.Cut()
				f.Sleep(4 * time.Minute)
				f.c2.Restore()
				f.Sleep(time.Minute)
			}
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=WaitingForRemoval")
			f.expectNoRecords()
		},
		"F is created again, and c2 keeps its object": func(f *fed) {
			f.writeOff()
			recreated := configMap(f.t)
			recreated.Object["spec"].(map[string]any)["template"] = map[string]any{"data": map[string]any{"a": "c"}}
			f.Put(recreated)
			f.Sleep(time.Minute)
			f.endOutage()
			f.expectWrites(f.c2, configMapUpdate)
			f.expectNoRecords()
			f.expectStatus("FederatedConfigMap", "f", "c1= c2=")
		},
		"F is created again just before the removal": func(f *fed) {
			f.writeOff()
			f.c2.OnRead(func(r controllertest.Request) error {
				if r.Verb == "get" && f.get(f.Host, "FederatedConfigMap", "shop", "f") == nil {
					f.Put(configMap(f.t)) // when its absence has been read
				}
				return nil
			})
			f.endOutage()
			f.expectConfigMap(f.c2, "managed")
			if w := f.c2.Writes(); slices.Contains(w, configMapDelete) || slices.Contains(w, configMapPatch) {
				f.t.Errorf("wrote %q", w)
			}
		},
		"F is created and deleted again, with other options": func(f *fed) {
			f.writeOff()
			recreated := configMap(f.t)
			recreated.SetAnnotations(map[string]string{policy.DeleteOptionAnnotation: `{"gracePeriodSeconds":7}`})
			f.Put(recreated)
			f.Sleep(time.Minute)
			f.Delete(recreated)
			f.Sleep(6 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "gone")
			if n := len(f.writeOffRecords()); n != 1 {
				f.t.Errorf("%d records", n)
			}
			var body string
			f.c2.OnWrite(func(r controllertest.Request) error { body = string(r.Body); return nil })
			f.endOutage()
			f.expectWrites(f.c2, configMapDelete)
			if !strings.Contains(body, `"gracePeriodSeconds":7`) || !strings.Contains(body, `"resourceVersion"`) || !strings.Contains(body, `"uid"`) {
				f.t.Error(body)
			}
			f.expectNoRecords()
		},
		"the object in c2 is made anew before c2 is back": func(f *fed) {
			f.writeOff()
			replacement := f.replacement(time.Now())
			f.c2.Delete(replacement)
			f.c2.Put(replacement)
			f.endOutage()
			f.expectConfigMap(f.c2, "unlabelled")
			f.expectNoRecords()
		},
		"the object in c2 is made anew, and its clock is behind": func(f *fed) {
			f.writeOff()
			replacement := f.replacement(time.Now().Add(-24 * time.Hour))
			f.c2.Delete(replacement)
			f.c2.Put(replacement)
			f.endOutage()
			f.expectConfigMap(f.c2, "unlabelled")
			f.expectNoRecords()
		},
		"the object in c2 is made anew, and the leader has never seen c2": func(f *fed) {
			f.deleteDuringOutage()
			f.Restart()
			f.Sleep(6 * time.Minute)
			if records := f.writeOffRecords(); len(records) != 1 || records[0].UID != "" {
				f.t.Errorf("records %v", records)
			}
			replacement := f.replacement(time.Now())
			f.c2.Delete(replacement)
			f.c2.Put(replacement)
			f.endOutage()
			f.expectConfigMap(f.c2, "unlabelled")
			f.expectNoRecords()
		},
		"the leader has never seen c2": func(f *fed) {
			f.deleteDuringOutage()
			f.Restart()
			f.Sleep(6 * time.Minute)
			f.endOutage()
			f.expectWrites(f.c2, configMapDelete)
			f.expectNoRecords()
		},
		"a new leader sees for itself that c2 is away": func(f *fed) {
			f.deleteDuringOutage()
			f.Sleep(4 * time.Minute)
			f.Restart(func() { <-time.After(2 * time.Minute) })
			f.Sleep(10 * time.Second)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
			f.Sleep(time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"the record is lost, and c2 keeps its object": func(f *fed) {
			f.writeOff()
			for _, object := range controllertest.List[corev1.ConfigMap](f.Host) {
				f.Delete(object)
			}
			f.endOutage()
			f.expectConfigMap(f.c2, "unlabelled")
		},
		"the cache does not know of the record yet": func(f *fed) {
			f.deleteDuringOutage()
			f.Lag(3*time.Second, "configmaps")
			<-time.After(5*time.Minute + 10*time.Millisecond)
			f.c2.Restore()
			f.Put(secret("c2", "other")) // a probe at once
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, configMapDelete)
		},
		"the record cannot be written": func(f *fed) {
			f.OnWrite(func(r controllertest.Request) error {
				if strings.HasPrefix(r.Resource, "configmaps") {
					return errors.New("no space left")
				}
				return nil
			})
			f.deleteDuringOutage()
			f.Sleep(20 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
			f.OnWrite(nil)
			f.Sleep(10 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "gone")
		},
		"the manager ends between the record and the finalizer, and c2 is back": func(f *fed) {
			f.OnWrite(func(r controllertest.Request) error {
				if strings.HasPrefix(r.Resource, "federatedconfigmaps") && len(controllertest.List[corev1.ConfigMap](f.Host)) > 0 {
					return errors.New("no space left")
				}
				return nil
			})
			f.deleteDuringOutage()
			f.Sleep(10 * time.Minute)
			if n := len(f.writeOffRecords()); n != 1 {
				f.t.Errorf("%d records", n)
			}
			f.OnWrite(nil)
			f.Restart(f.c2.Restore)
			f.Sleep(time.Minute)
			f.expectWrites(f.c2, configMapDelete)
			f.expectStatus("FederatedConfigMap", "f", "gone")
			f.expectNoRecords()
		},
		"c2 is away again before its object is gone": func(f *fed) {
			f.change(f.c2, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers([]string{"example.com/mine"}) })
			f.Sleep(time.Minute)
			f.c2.Writes()
			f.writeOff()
			f.endOutage()
			f.expectWrites(f.c2, configMapDelete)
			if n := len(f.writeOffRecords()); n != 1 {
				f.t.Errorf("%d records while c2 has its object", n)
			}
			f.change(f.c2, "ConfigMap", "shop", "f", func(u *unstructured.Unstructured) { u.SetFinalizers(nil) })
			f.Sleep(time.Minute)
			f.expectNoRecords()
		},
		"an orphaning F goes without a record": func(f *fed) {
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/orphan: 'true'}", "metadata", "annotations")
			f.deleteDuringOutage()
			f.Sleep(6 * time.Minute)
			f.expectStatus("FederatedConfigMap", "f", "gone")
			f.expectNoRecords()
			if events := strings.Join(f.Events(), " "); !strings.Contains(events, `cluster "c2" has been away for long; its object stays there`) {
				f.t.Errorf("Events %q", events)
			}
			f.endOutage()
			f.expectConfigMap(f.c2, "unlabelled")
		},
		"a malformed deleteoption waits": func(f *fed) {
			f.set(f.Host, "FederatedConfigMap", "shop", "f", "{kubefed.io/deleteoption: soon}", "metadata", "annotations")
			f.deleteDuringOutage()
			f.Sleep(20 * time.Minute)
			f.expectNoRecords()
			f.expectWarnings("InvalidDeleteOptions", "RetrievingClusterHealthFailed")
			f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1=WaitingForRemoval c2=ClusterNotReady")
		},
		"a cluster that leaves takes its records along and keeps its objects": func(f *fed) {
			f.writeOff()
			f.Delete(kubeFedCluster(f.c2, "c2"))
			f.Sleep(time.Minute)
			f.expectNoRecords()
			f.c2.Restore()
			f.Sleep(time.Minute)
			f.expectConfigMap(f.c2, "managed")
		},
	} {
		t.Run(name, func(t *testing.T) { runWithConfigMap(t, tc) })
	}
}
