// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"errors"
	"fmt"
	"runtime/debug"
	"slices"

	"github.com/spf13/pflag"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	toolscache "k8s.io/client-go/tools/cache"
	cliflag "k8s.io/component-base/cli/flag"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// checkEntries returns every mistake in the entries that can be found before the flags are parsed.
func checkEntries(entries []Entry) error {
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
		if e.Rules == nil {
			add("the function Rules is missing")
		}
		if e.New == nil {
			add("the function New is missing")
		}
	}
	return errors.Join(errs...)
}

// flagGroup returns the group of the controller's flags in --help.
func (e Entry) flagGroup() string { return e.Name + " controller" }

// addFlags adds the controller's flags to sets. It returns an error if the host or another
// controller has a flag of the same name: pflag would drop one of the two, or panic.
func (e Entry) addFlags(sets *cliflag.NamedFlagSets) (err error) {
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
		sets.FlagSet(e.flagGroup()).AddFlagSet(own)
	}
	return errors.Join(errs...)
}

// declareNeeds calls Needs of every entry and stores the results with For filled in. It is called
// after the flags have been parsed. The error lists the mistakes of all entries.
func declareNeeds(entries []Entry) error {
	var errs []error
	for i := range entries {
		e := &entries[i]
		needs, err := e.callNeeds()
		if err != nil {
			errs = append(errs, fmt.Errorf("controller %s: %w", e.Name, err))
		}
		for _, n := range needs {
			gr := n.Resource.GroupResource()
			if slices.ContainsFunc(e.needs, func(other informers.Need) bool { return other.Resource.GroupResource() == gr }) {
				errs = append(errs, fmt.Errorf("controller %s: Needs declares %s twice", e.Name, gr))
			}
			n.For = e.Name
			e.needs = append(e.needs, n)
		}
	}
	return errors.Join(errs...)
}

// callNeeds calls Needs. It returns a panic as an error.
func (e Entry) callNeeds() (needs []informers.Need, err error) {
	defer contained("Needs", &err)
	return e.Needs()
}

// callRules calls Rules. It returns a panic as an error.
func (e Entry) callRules() (rules []rbacv1.PolicyRule, err error) {
	defer contained("Rules", &err)
	return e.Rules(), nil
}

// contained is deferred. It makes a panic of an entry's function an error.
func contained(function string, err *error) {
	if r := recover(); r != nil {
		*err = fmt.Errorf("panic in %s: %v\n%s", function, r, debug.Stack())
	}
}

// informer returns the informer of a resource that the entry itself declares. An informer that only
// another entry declares may lack what this one needs of the objects, and is missing when the other
// is switched off.
func (e Entry) informer(cache *informers.Factory, resource schema.GroupVersionResource) toolscache.SharedIndexInformer {
	informer, ok := cache.Informer(e.Name, resource)
	if !ok {
		panic(mistake{fmt.Errorf("asks for the informer of %s, which its entry does not declare in Needs", resource.GroupResource())})
	}
	return informer
}

// build calls New. It returns a panic as an error, so that one start reports the mistakes of all
// entries.
func (e Entry) build(h Host) (c controllers.Controller, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case mistake:
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
