// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command manager runs the controllers of a cluster in one highly available process.
package main

import (
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

func main() {
	os.Exit(cli.Run(command(os.Args[0])))
}

// command returns the manager's command. A program named kubectl-NAME is a plugin of kubectl, and its help
// shows what a user of the plugin types.
func command(program string) *cobra.Command {
	cmd := app.NewCommand(app.With(builtin.Entries()...))
	name := strings.TrimSuffix(filepath.Base(program), filepath.Ext(program))
	if plugin, ok := strings.CutPrefix(name, "kubectl-"); ok {
		cmd.Annotations = map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl " + plugin}
	}
	return cmd
}
