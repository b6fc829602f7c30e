// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package manager tests managers as processes on a real control plane, judged from outside: by
// objects, the audit log, exit codes and the responses of their ports.
package manager

import (
	"os"
	"testing"

	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

// shared is the control plane of all tests of the package.
var shared *fleet.Fleet

func TestMain(m *testing.M) { os.Exit(fleet.Main(m, &shared, fleet.Options{})) }
