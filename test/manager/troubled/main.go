// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Command troubled is a manager whose controllers have one trouble each, for tests of the effect on
// the others.
package main

import (
	"context"
	"errors"
	"os"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/cli"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

// poison on a ConfigMap makes the mapping of the controller "poisoned" panic.
const poison = "example.com/poison"

func main() {
	os.Exit(cli.Run(app.NewCommand(app.With(builtin.Entries()...), app.With(
		idle("absent", informers.Need{Resource: schema.GroupVersionResource{Group: "test.example.com", Version: "v1", Resource: "doodads"}}),
		idle("forbidden", informers.Need{Resource: schema.GroupVersionResource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}}),
		idle("poisoned", informers.Need{Resource: informers.ConfigMaps, Annotations: []string{poison}}),
		controllers.Entry{
			Name: "failing", Summary: "stops as soon as it is started",
			New: func(controllers.Host) (controllers.Controller, error) { return failing{}, nil },
		},
	))))
}

// idle is a controller that looks at objects and does nothing.
func idle(name string, need informers.Need) controllers.Entry {
	return controllers.Entry{
		Name: name, Summary: "does nothing",
		Needs: func(controllers.Settings) ([]informers.Need, error) { return []informers.Need{need}, nil },
		Permissions: func(controllers.Settings) []rbacv1.PolicyRule {
			return []rbacv1.PolicyRule{{APIGroups: []string{need.Resource.Group}, Resources: []string{need.Resource.Resource}, Verbs: []string{"list", "watch"}}}
		},
		New: func(h controllers.Host) (controllers.Controller, error) {
			nothing := func(context.Context, cache.ObjectName) (time.Duration, error) { return 0, nil }
			return controllers.NewLoop(h.LoopOptions, nothing, controllers.WatchMapped(informers.For[metav1.Object](h, need.Resource), look))
		},
	}
}

func look(e controllers.Event[metav1.Object]) []cache.ObjectName {
	obj := e.New
	if obj == nil {
		obj = e.Old
	}
	if obj.GetAnnotations()[poison] != "" {
		panic("poison")
	}
	return []cache.ObjectName{cache.MetaObjectToName(obj)}
}

type failing struct{}

func (failing) Run(context.Context) error  { return errors.New("out of luck") }
func (failing) Status() controllers.Status { return controllers.Status{Name: "failing"} }
