// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command manager runs the controllers of a cluster in one highly available process.
package main

import (
	"os"

	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
)

func main() {
	os.Exit(cli.Run(app.NewCommand()))
}
