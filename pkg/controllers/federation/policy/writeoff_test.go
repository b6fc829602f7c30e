// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy_test

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation/policy"
)

func TestWriteOffWaitsForTheGracePeriod(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, tc := range map[string]struct {
		outage  policy.Outage
		deleted time.Time
		want    time.Duration
	}{
		"away and deleted for the grace":             {policy.Outage{Since: ago(5 * time.Minute), Confirmed: true}, ago(5 * time.Minute), 0},
		"away for long, deleted a minute ago":        {policy.Outage{Since: ago(time.Hour), Confirmed: true}, ago(time.Minute), 4 * time.Minute},
		"away for a minute, deleted long ago":        {policy.Outage{Since: ago(time.Minute), Confirmed: true}, ago(time.Hour), 4 * time.Minute},
		"long ago, and this process has not seen it": {policy.Outage{Since: ago(time.Hour)}, ago(time.Hour), 5 * time.Second},
		"a minute ago, this process has not seen it": {policy.Outage{Since: ago(time.Minute)}, ago(time.Hour), 4 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			if got := tc.outage.RemainingGrace(tc.deleted, 5*time.Minute, now); got != tc.want {
				t.Errorf("%s, want %s", got, tc.want)
			}
		})
	}
}

func TestWriteOffCoversOnlyTheDeletedObject(t *testing.T) {
	deleted := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	for name, tc := range map[string]struct {
		recorded, uid types.UID
		createdAfter  time.Duration // after the deletion
		want          bool
	}{
		"the object that was seen":                {"a", "a", -time.Hour, true},
		"an older object of another UID":          {"a", "b", -time.Hour, false},
		"a newer object of the same UID":          {"a", "a", time.Hour, false},
		"an older object, no UID is known":        {"", "b", -time.Second, true},
		"a newer object, no UID is known":         {"", "b", time.Second, false},
		"one of the same second, no UID is known": {"", "b", 0, false},
	} {
		t.Run(name, func(t *testing.T) {
			live := &metav1.ObjectMeta{UID: tc.uid, CreationTimestamp: metav1.NewTime(deleted.Add(tc.createdAfter))}
			if got := (policy.WriteOff{UID: tc.recorded, Deleted: deleted}).Covers(live); got != tc.want {
				t.Errorf("covers: %t, want %t", got, tc.want)
			}
		})
	}
}

func TestWriteOffIsReadOnlyUnderItsName(t *testing.T) {
	record := policy.WriteOff{Cluster: "c2", Type: "configmaps", Namespace: "shop", Name: "f", FederatedUID: "1", Deleted: time.Unix(1, 0).UTC()}
	name := policy.WriteOffName("c2", "configmaps", "shop", "f")
	if read, err := policy.ReadWriteOff(name, record.Data()); err != nil || read.Cluster != "c2" || !read.Deleted.Equal(record.Deleted) {
		t.Errorf("read %v, %v", read, err)
	}
	timeless := record
	timeless.Deleted = time.Time{}
	for title, data := range map[string]map[string]string{"no data": nil, "no JSON": {"record": "x"}, "a record without a time": timeless.Data()} {
		if _, err := policy.ReadWriteOff(name, data); err == nil {
			t.Errorf("%s can be read", title)
		}
	}
	if _, err := policy.ReadWriteOff("federation-written-off-other", record.Data()); err == nil {
		t.Error("a record under another name can be read")
	}
}
