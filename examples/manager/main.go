// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command manager is a build of the manager with a controller of your own.
package main

import (
	"os"

	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/examples/greeter"
	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

func main() {
	os.Exit(cli.Run(app.NewCommand(app.With(builtin.Entries()...), app.With(greeter.Entry()))))
}
