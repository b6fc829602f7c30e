// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
)

const commandsIntro = `# Commands

<!-- Written by make generate. -->

These are the commands of ` + "`manager`" + `, as their ` + "`--help`" + ` has them. Without a command the manager runs, with its
[flags](flags.md).
`

// commandsOutro stands for cobra's own command, whose help is long.
const commandsOutro = `
## manager completion

` + "`manager completion SHELL`" + ` prints a script with which a shell completes commands and flags. SHELL is bash, fish,
powershell or zsh. ` + "`manager completion SHELL --help`" + ` says how to load the script.
`

// commandsPage returns the page of the commands.
func commandsPage(string) (map[string][]byte, error) {
	page := bytes.NewBufferString(commandsIntro)
	writeCommands(page, app.NewCommand(app.With(builtin.Entries()...)))
	page.WriteString(commandsOutro)
	return map[string][]byte{"../docs/operate/commands.md": page.Bytes()}, nil
}

// writeCommands writes a section for a command, or for each of its commands if it has some.
func writeCommands(page *bytes.Buffer, cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		writeCommands(page, c)
	}
	if cmd.HasSubCommands() {
		return
	}
	fmt.Fprintf(page, "\n## %s\n\n`%s`\n", cmd.CommandPath(), cmd.UseLine())
	for text := range strings.SplitSeq(strings.TrimSpace(cmd.Long), "\n\n") {
		if example := strings.TrimLeft(text, " \t"); example != text {
			indent := text[:len(text)-len(example)]
			text = "<!-- not run: an example of the help -->\n```sh\n" + strings.ReplaceAll(example, "\n"+indent, "\n") + "\n```"
		} else {
			text = escapeCell.Replace(text)
		}
		fmt.Fprintf(page, "\n%s\n", strings.TrimSpace(text))
	}
	var flags cliflag.NamedFlagSets
	ownFlags := flags.FlagSet("own")
	cmd.Flags().VisitAll(func(flag *pflag.Flag) {
		if cmd.Root().Flags().Lookup(flag.Name) != flag {
			ownFlags.AddFlag(flag)
		}
	})
	if cmd.Flags().Lookup("controllers") != nil {
		fmt.Fprint(page, "\nIt takes the [flags of the manager](flags.md).\n")
	}
	if ownFlags.HasFlags() {
		var help bytes.Buffer
		cliflag.PrintSections(&help, flags, 80) // as the manager's help
		writeFlags(page, help.String())
	}
}
