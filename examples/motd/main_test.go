// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest"
)

func TestNamespaceGetsItsConfigMap(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := controllertest.NewHost(t, entry(),
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "shop", Labels: map[string]string{"motd": ""}}},
			&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "other"}})
		if got := h.Writes(); !slices.Equal(got, []string{"apply configmaps shop/motd"}) {
			t.Errorf("writes %q", got)
		}
	})
}

func TestDocsShowThisProgram(t *testing.T) {
	page, err := os.ReadFile("../../docs/extend/one-file.md")
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile("main.go")
	if err != nil {
		t.Fatal(err)
	}
	if _, code, _ := strings.Cut(string(program), "\n\n"); !strings.Contains(string(page), "```go\n"+code+"```\n") {
		t.Error("docs/extend/one-file.md does not show main.go as it is")
	}
}
