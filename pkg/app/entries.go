// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"runtime/debug"

	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	clientscheme "k8s.io/client-go/kubernetes/scheme"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// checkEntries returns every mistake in the entries that can be found before the flags are parsed.
func checkEntries(entries []controllers.Entry) error {
	var errs []error
	taken := map[string]string{} // names and aliases, and who has them
	for i, e := range entries {
		who := "controller " + e.Name
		if e.Name == "" {
			who = fmt.Sprintf("controller number %d of the registry, which has no name", i+1)
		}
		add := func(format string, args ...any) { errs = append(errs, fmt.Errorf(who+": "+format, args...)) }
		for _, name := range append([]string{e.Name}, e.Aliases...) {
			if problems := validation.IsDNS1123Label(name); len(problems) > 0 {
				add("the name %q is not a DNS label: %s", name, problems[0])
			}
			if other, ok := taken[name]; ok {
				add("the name %q is taken by %s", name, other)
			}
			taken[name] = who
		}
		if e.Needs == nil {
			add("the function Needs is missing")
		}
		if e.Permissions == nil {
			add("the function Permissions is missing")
		}
		if e.New == nil {
			add("the function New is missing")
		}
	}
	return errors.Join(errs...)
}

// flagGroup returns the group of the controller's flags in --help.
func flagGroup(e controllers.Entry) string { return e.Name + " controller" }

// addFlags adds the controller's flags to sets. It returns an error if the host or another
// controller has a flag of the same name: pflag would drop one of the two, or panic.
func addFlags(e controllers.Entry, sets *cliflag.NamedFlagSets) (err error) {
	defer func() {
		if r := recover(); r != nil { // for instance, AddFlags defines a flag twice
			err = fmt.Errorf("controller %s: AddFlags: %v", e.Name, r)
		}
	}()
	own := pflag.NewFlagSet(e.Name, pflag.ContinueOnError)
	e.Config.AddFlags(own)
	var errs []error
	own.VisitAll(func(f *pflag.Flag) {
		if f.Name == "help" || f.Name == "version" {
			errs = append(errs, fmt.Errorf("controller %s: the flag --%s exists already", e.Name, f.Name))
		}
		for _, group := range sets.Order {
			set := sets.FlagSets[group]
			if set.Lookup(f.Name) != nil {
				errs = append(errs, fmt.Errorf("controller %s: the flag --%s exists already, in the group %q", e.Name, f.Name, group))
			}
			if s := f.Shorthand; s == "h" || s != "" && set.ShorthandLookup(s) != nil {
				errs = append(errs, fmt.Errorf("controller %s: the shorthand -%s of --%s exists already", e.Name, s, f.Name))
			}
		}
	})
	if len(errs) == 0 {
		sets.FlagSet(flagGroup(e)).AddFlagSet(own)
	}
	return errors.Join(errs...)
}

// addToScheme calls AddToScheme. The library panics if a kind has two Go types.
func addToScheme(e controllers.Entry, scheme *runtime.Scheme) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	return e.AddToScheme(scheme)
}

// newScheme returns a scheme with the built-in types and those that entries add.
func newScheme(entries []controllers.Entry) (*runtime.Scheme, error) {
	scheme := runtime.NewScheme()
	if err := clientscheme.AddToScheme(scheme); err != nil {
		return nil, err
	}
	for _, e := range entries {
		if e.AddToScheme == nil {
			continue
		}
		if err := addToScheme(e, scheme); err != nil {
			return nil, fmt.Errorf("controller %s: AddToScheme: %w", e.Name, err)
		}
	}
	return scheme, nil
}

// needsOf returns what the entries need of the cache, with For filled in. The error lists the mistakes
// of all entries.
func needsOf(entries []controllers.Entry, s controllers.Settings) (all []informers.Need, err error) {
	var errs []error
	for _, e := range entries {
		declared := map[schema.GroupResource]bool{}
		needs, err := callNeeds(e, s)
		if err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", e.Name, err))
		}
		for _, n := range needs {
			gr := n.Resource.GroupResource()
			if declared[gr] {
				errs = append(errs, fmt.Errorf("controller %s: Needs declares %s twice", e.Name, gr))
			}
			declared[gr] = true
			n.For = e.Name
			all = append(all, n)
		}
	}
	return all, errors.Join(errs...)
}

// callNeeds calls Needs. It returns a panic as an error.
func callNeeds(e controllers.Entry, s controllers.Settings) (needs []informers.Need, err error) {
	defer contained("Needs", &err)
	return e.Needs(s)
}

// callPermissions calls Permissions. It returns a panic as an error.
func callPermissions(e controllers.Entry, s controllers.Settings) (rules []rbacv1.PolicyRule, err error) {
	defer contained("Permissions", &err)
	return e.Permissions(s), nil
}

// contained is deferred. It makes a panic of an entry's function an error.
func contained(function string, err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("panic in %s: %v\n%s", function, r, debug.Stack())
	}
}

// newController calls New. It returns a panic as an error, so that one start reports the mistakes of all
// entries.
func newController(e controllers.Entry, h controllers.Host) (c controllers.Controller, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case controllers.Mistake:
			err = r
		case informers.MismatchError:
			err = r
		default:
			err = fmt.Errorf("panic in New: %v\n%s", r, debug.Stack())
		}
	}()
	if c, err = e.New(h); err != nil {
		return nil, err
	}
	if c == nil {
		return nil, errors.New("no controller was returned by New")
	}
	// A pointer that is nil, or a loop in a controller that is, would else fail in Run, again and again.
	if stack, err := controllers.Contain(func() error { c.Status(); return nil }); stack != nil {
		return nil, fmt.Errorf("what New returned cannot tell its Status, as if it or its Loop were nil: %w", err)
	}
	return c, nil
}
