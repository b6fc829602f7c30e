// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"
)

// plainErrors is the pre-run of the commands that are for people: without it the manager's logging would be set up, and
// their errors would be log lines.
func plainErrors(*cobra.Command, []string) {}

// outputFormat is the value of -o: empty for a table, json or yaml.
type outputFormat string

func (o *outputFormat) addFlag(fs *pflag.FlagSet) {
	fs.VarP(o, "output", "o", "Print json or yaml instead of a table.")
}

// String implements pflag.Value, as the other two.
func (o *outputFormat) String() string { return string(*o) }

// Type is the placeholder in --help.
func (o *outputFormat) Type() string { return "format" }

// Set refuses what is no format.
func (o *outputFormat) Set(text string) error {
	switch text {
	case "", "json", "yaml":
		*o = outputFormat(text)
		return nil
	}
	return fmt.Errorf("must be json or yaml")
}

// write writes value in the format, or calls table.
func (o outputFormat) write(w io.Writer, value any, table func(io.Writer)) error {
	switch o {
	case "json":
		encoder := json.NewEncoder(w)
		encoder.SetIndent("", "  ")
		return encoder.Encode(value)
	case "yaml":
		text, err := yaml.Marshal(value)
		if err == nil {
			_, err = w.Write(text)
		}
		return err
	}
	table(w)
	return nil
}

// table prints rows in columns, as kubectl does.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer) table { return table{tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)} }

func (t table) row(cells ...string) { fmt.Fprintln(t.w, strings.Join(cells, "\t")) }

// end prints the rows so far; those that follow get columns of their own.
func (t table) end() { _ = t.w.Flush() } // to a terminal or a pipe that is gone, there is nobody to tell

func orNone(s string) string {
	if s == "" {
		return "<none>"
	}
	return s
}

func yesNo(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}
