// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package controllertest tests controllers. It runs an entry in the manager as it is in production,
// with its cache, queue, clients and Events, against an API server in the test's process:
//
//	func TestAWidgetGetsADeployment(t *testing.T) {
//		synctest.Test(t, func(t *testing.T) {
//			h := controllertest.NewHost(t, widget.Entry(), &v1.Widget{ObjectMeta: ...})
//			if diff := cmp.Diff([]string{"apply deployments.apps shop/a"}, h.Writes()); diff != "" {
//				t.Error(diff)
//			}
//			h.Sleep(10 * time.Minute) // at once: nothing really sleeps in a bubble of synctest
//			...
//		})
//	}
//
// The clock of the bubble begins at midnight UTC 2000-01-01 and stands still while anything is left to
// do. So a test never waits in vain, and the order of writes is always the same.
//
// [Setup] is for several entries, flags of the manager and a standby. docs/extend/testing.md has an example
// of each kind of test.
//
// The package comment of internal/apiserver lists what the API server lacks: above all, validation and
// other controllers. Test what depends on these on a real API server.
package controllertest
