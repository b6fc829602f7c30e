// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package kubefed runs KubeFed's tests with KubeFed's own flags. test/federation runs it on a federation.
package kubefed

import (
	"os"
	"testing"

	"sigs.k8s.io/kubefed/test/e2e"
	"sigs.k8s.io/kubefed/test/e2e/framework"
)

func TestMain(m *testing.M) {
	framework.ParseFlags()
	os.Exit(m.Run())
}

func TestKubeFedSuitePasses(t *testing.T) { e2e.RunE2ETests(t) }
