// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
)

const flagsIntro = `# Flags

<!-- Written by make generate. -->

These are the flags of ` + "`manager`" + `, as ` + "`manager --help`" + ` has them. [Commands](commands.md) has the flags of its commands.
[Configuration](configuration.md) says which matter most, and how a file sets them. The page of each
[controller](../README.md#controllers) explains the controller's flags. A flag that takes no value is a switch. A
flag without a default is off, 0 or empty, unless its meaning says otherwise.
`

var (
	flagGroup = regexp.MustCompile(`(?m)^(.+) flags:\n\n((?: .*\n)+)`)
	// oneFlag matches a flag's names, the type of its value if it takes one, and its help.
	oneFlag = regexp.MustCompile(`(?m)^(?: {6}|  )((?:-\w, )?--\S+)(?: (\S+))? *\n((?: {16}.*\n)+)`)
	// escapeCell keeps a text from being Markdown.
	escapeCell = strings.NewReplacer("|", `\|`, "<", `\<`, "*", `\*`)
)

// flagsPage returns the page of the flags, from the help that a test of pkg/app compares with the program's.
func flagsPage(dir string) (map[string][]byte, error) {
	golden, err := os.ReadFile(filepath.Join(dir, "..", "pkg", "app", "testdata", "help.golden"))
	if err != nil {
		return nil, err
	}
	page := bytes.NewBufferString(flagsIntro)
	for _, group := range flagGroup.FindAllStringSubmatch(string(golden)+"\n", -1) {
		fmt.Fprintf(page, "\n## %s\n", group[1])
		writeFlags(page, group[2])
	}
	return map[string][]byte{"../docs/operate/flags.md": page.Bytes()}, nil
}

// writeFlags writes a table of the flags in a help.
func writeFlags(page *bytes.Buffer, help string) {
	fmt.Fprint(page, "\n| flag | value | default | meaning |\n|---|---|---|---|\n")
	for _, flag := range oneFlag.FindAllStringSubmatch(help, -1) {
		help, value, found := strings.Cut(strings.Join(strings.Fields(flag[3]), " "), " (default ")
		if found {
			value = "`" + strings.TrimSuffix(value, ")") + "`"
		}
		fmt.Fprintf(page, "| `%s` | %s | %s | %s |\n", flag[1], flag[2], value, escapeCell.Replace(help))
	}
}
