// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package federation_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// TestWriteOffCoversANamespaceOfTheHost deletes a Namespace of the host with all that is federated in it.
func TestWriteOffCoversANamespaceOfTheHost(t *testing.T) {
	runWithConfigMap(t, func(f *fed) {
		f.c2.Cut()
		f.Sleep(time.Minute)
		f.Delete(configMap(f.t), federated(f.t, "Namespace", "shop", "{}"))
		f.Sleep(6 * time.Minute)
		f.expectStatus("FederatedConfigMap", "f", "gone")
		f.expectStatus("FederatedNamespace", "shop", "gone")
		if n := len(f.writeOffRecords()); n != 2 {
			f.t.Errorf("%d records", n)
		}
		f.endOutage()
		got := f.c2.Writes()
		if slices.Sort(got); !slices.Equal(got, []string{configMapDelete, "delete namespaces shop"}) {
			t.Errorf("wrote %q", got)
		}
		f.expectNoRecords()
	})
}

// TestGraceOfZeroWritesNothingOff has a grace of 0.
func TestGraceOfZeroWritesNothingOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFedWith(t, []string{"--federation-unreachable-grace-period=0"}, configMap(t))
		f.deleteDuringOutage()
		f.Sleep(20 * time.Minute)
		f.expectStatus("FederatedConfigMap", "f", "CheckClusters c1= c2=ClusterNotReady")
		f.endOutage()
		f.expectConfigMap(f.c2, "gone")
		f.expectStatus("FederatedConfigMap", "f", "gone")
	})
}

// TestLongAbsenceOfAClusterIsMadeGood has a cluster that is away for an hour while many federated objects
// change.
func TestLongAbsenceOfAClusterIsMadeGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFed(t)
		numbered := func(i int, content string) *unstructured.Unstructured {
			return federated(t, "ConfigMap", fmt.Sprintf("f-%d", i), fmt.Sprintf("{template: {data: {a: %s}}, %s}", content, bothClusters))
		}
		const size, recreated = 500, 100 // the first half is deleted, and some of it made again
		for i := range 2 * size {
			f.Put(numbered(i, "b"))
		}
		f.Sleep(5 * time.Minute)
		if n := len(f.c2.Writes()); n != 2*size+1 {
			t.Fatalf("%d writes in c2", n)
		}
		f.c2.Cut()
		f.Sleep(10 * time.Minute)
		for i := range size {
			f.Delete(numbered(i, "b"))
			f.Put(numbered(size+i, "changed"))
		}
		f.Sleep(6 * time.Minute)
		for i := range 2 * size {
			if name := fmt.Sprintf("f-%d", i); (f.get(f.Host, "FederatedConfigMap", "shop", name) == nil) != (i < size) {
				t.Errorf("%s exists, or not", name)
			}
		}
		if n := len(f.writeOffRecords()); n != size {
			t.Errorf("%d records", n)
		}
		for i := range recreated {
			f.Put(numbered(i, "again"))
		}
		f.Sleep(44 * time.Minute)
		f.c2.Restore()
		f.Sleep(70 * time.Second) // a probe, and a minute
		writes := map[string]int{}
		for _, w := range f.c2.Writes() {
			writes[strings.Fields(w)[0]]++
			i := 0
			if _, err := fmt.Sscanf(w, "delete configmaps shop/f-%d", &i); err == nil && (i < recreated || i >= size) {
				t.Error(w)
			}
		}
		if writes["delete"] != size-recreated || writes["update"] != size+recreated || len(writes) != 2 {
			t.Errorf("wrote %v in c2", writes)
		}
		f.expectNoRecords()
	})
}
