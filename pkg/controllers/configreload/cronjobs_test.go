// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"strings"
	"testing"

	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

func TestRunNameOfALongNameIsCut(t *testing.T) {
	long := strings.Repeat("a", 63)
	w := &policy.Workload{QueueKey: policy.QueueKey{Kind: "CronJob", ObjectName: cache.NewObjectName("shop", long)}}
	got := runName(&policy.Facts{Workload: w}, &policy.Plan{})
	if len(got) != 52+1+8 || !strings.HasPrefix(got, long[:52]+"-") {
		t.Errorf("name = %q, want 52 characters, a hyphen and 8 digits", got)
	}
	if got, want := cutName(strings.Repeat("a", 50)+"-.nightly")+"-", strings.Repeat("a", 50)+"-"; got != want {
		t.Errorf("cut to %q, want %q: a dot before a hyphen is no name", got, want)
	}
}
