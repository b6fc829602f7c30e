// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command widget is a manager with the controller of Widgets and no other.
package main

import (
	"os"

	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/examples/widget/controller"
	"github.com/quartermaster-dev/quartermaster/pkg/app"
)

func main() {
	os.Exit(cli.Run(app.NewCommand(app.Named("widget"), app.With(controller.Entry()))))
}
