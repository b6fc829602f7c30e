// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"
)

// BuildOption is a part of a build of the manager: an [Entry], or what [Named] or [WithoutBuiltIns]
// returns.
type BuildOption interface{ addTo(b *build) }

// build is what a program puts into its manager.
type build struct {
	name     string
	builtIns bool
	entries  []Entry
}

func (e Entry) addTo(b *build) { b.entries = append(b.entries, e) }

type buildOption func(*build)

func (f buildOption) addTo(b *build) { f(b) }

// Named gives a build a name in place of quartermaster, so that both can run in one cluster. It is
// the name of the command, of the Lease, of the ServiceAccount and of the label
// app.kubernetes.io/name of the Pods; names of roles and the source components of Events begin with
// it. It must be a DNS label.
func Named(name string) BuildOption {
	return buildOption(func(b *build) { b.name = name })
}

// WithoutBuiltIns leaves the manager's own controllers out of a build.
func WithoutBuiltIns() BuildOption {
	return buildOption(func(b *build) { b.builtIns = false })
}

// newBuild returns the build with these options.
func newBuild(options []BuildOption) (build, error) {
	b := build{name: defaultName, builtIns: true}
	for _, option := range options {
		if option == nil {
			return b, errors.New("an option of the build is nil")
		}
		option.addTo(&b)
	}
	if problems := validation.IsDNS1123Label(b.name); len(problems) > 0 {
		return b, fmt.Errorf("the name %q of the build is not a DNS label: %s", b.name, problems[0])
	}
	return b, nil
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
