// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"path/filepath"
	"testing"
)

func TestDeployIsUpToDate(t *testing.T) {
	if err := run(filepath.Join("..", "..", "deploy"), true); err != nil {
		t.Error(err)
	}
}
