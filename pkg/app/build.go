// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
)

// BuildOption is what a program puts into its build of the manager: see [With], [Named] and
// [WithoutBuiltIns].
type BuildOption func(*build)

type build struct {
	name    string
	entries []controllers.Entry // those of With, after the built-in ones
	without bool
}

// With adds controllers to a build, after the manager's own.
func With(entries ...controllers.Entry) BuildOption {
	return func(b *build) { b.entries = append(b.entries, entries...) }
}

// Named gives a build a name in place of quartermaster, so that both can run in one cluster. It is
// the name of the command, of the Lease, of the ServiceAccount and of the label
// app.kubernetes.io/name of the Pods; names of roles and the source components of Events begin with
// it. It must be a DNS label.
func Named(name string) BuildOption {
	return func(b *build) { b.name = name }
}

// WithoutBuiltIns leaves the manager's own controllers out of a build.
func WithoutBuiltIns() BuildOption {
	return func(b *build) { b.without = true }
}

// newBuild returns the build with these options. The error lists the mistakes in all entries.
func newBuild(options []BuildOption) (build, error) {
	b := build{name: defaultName}
	for _, option := range options {
		option(&b)
	}
	if problems := validation.IsDNS1123Label(b.name); len(problems) > 0 {
		return b, fmt.Errorf("the name %q of the build is not a DNS label: %s", b.name, problems[0])
	}
	if !b.without {
		b.entries = append(registry(), b.entries...)
	}
	return b, checkEntries(b.entries)
}

// defaultName is the name of a build that has no other.
const defaultName = "quartermaster"

// command returns the name of the command in its help.
func (b build) command() string {
	if b.name == defaultName {
		return "manager"
	}
	return b.name
}

// lease returns the name of the Lease, unless flags give another.
func (b build) lease() types.NamespacedName {
	return types.NamespacedName{Namespace: metav1.NamespaceSystem, Name: b.name}
}

// originals returns the operators that --compat can name.
func (b build) originals() (names []string) {
	for _, e := range b.entries {
		for _, name := range e.Compat {
			if !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	return names
}
