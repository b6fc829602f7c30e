// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/quartermaster-dev/quartermaster/examples/widget/controller"
	"github.com/quartermaster-dev/quartermaster/pkg/app"
)

func TestRolesAreThoseThatTheBuildPrints(t *testing.T) {
	cmd := app.NewCommand(app.Named("widget"), app.With(controller.Entry()))
	var printed bytes.Buffer
	cmd.SetOut(&printed)
	cmd.SetArgs([]string{"rbac"})
	if err := cmd.Execute(); err != nil {
		t.Fatal(err)
	}
	file, err := os.ReadFile("config/rbac.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(file), printed.String()); diff != "" {
		t.Errorf("config/rbac.yaml is old, run go generate ./... (-file +printed):\n%s", diff)
	}
}
