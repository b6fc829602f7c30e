// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package scaleschedule_test

import (
	"reflect"
	"strings"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
)

// TestValidateNamesTheFlag has a mistake in each flag, all at once.
func TestValidateNamesTheFlag(t *testing.T) {
	good := scaleschedule.NewConfig()
	if err := good.Validate(controllers.Settings{}); err != nil {
		t.Error(err)
	}
	bad := scaleschedule.Config{Kinds: []string{"daemonsets"}, MaxWritesPerSecond: -1, MaxClockSkew: 1}
	bad.DefaultUptime, bad.Timezone, bad.Hold = "8-18", "PST", -1
	err := bad.Validate(controllers.Settings{})
	if err == nil {
		t.Fatal("no error")
	}
	for _, flag := range []string{"kinds", "max-writes-per-second", "max-clock-skew", "default-uptime", "timezone", "hold"} {
		if !strings.Contains(err.Error(), "--scale-schedule-"+flag+": ") {
			t.Errorf("no mistake in --scale-schedule-%s: %v", flag, err)
		}
	}
}

// TestPermissionsFollowKindsAndNamespaces says what the controller may do.
func TestPermissionsFollowKindsAndNamespaces(t *testing.T) {
	permissions := func(settings controllers.Settings, change func(*scaleschedule.Config)) map[string]string {
		entry := scaleschedule.Entry()
		if change != nil {
			change(entry.Config.(*scaleschedule.Config))
		}
		got := map[string]string{}
		for _, r := range entry.Permissions(settings) {
			got[strings.Join(r.Resources, ",")+"."+strings.Join(r.APIGroups, ",")] += strings.Join(r.Verbs, " ")
		}
		return got
	}
	const write = "get patch"
	for name, tc := range map[string]struct{ got, want map[string]string }{
		"by default": {permissions(controllers.Settings{}, nil), map[string]string{
			"deployments.apps": write, "statefulsets.apps": write, "cronjobs.batch": write}},
		"the other kinds, in some namespaces": {permissions(controllers.Settings{Namespaces: []string{"a"}},
			func(c *scaleschedule.Config) {
				c.Kinds = []string{"horizontalpodautoscalers", "rollouts.argoproj.io", "scaledobjects.keda.sh"}
			}), map[string]string{"horizontalpodautoscalers.autoscaling": write, "rollouts.argoproj.io": write, "scaledobjects.keda.sh": write}},
	} {
		if !reflect.DeepEqual(tc.got, tc.want) {
			t.Errorf("%s: %v, want %v", name, tc.got, tc.want)
		}
	}
	if rules := scaleschedule.Entry().Permissions(controllers.Settings{Compat: []string{"downscaler"}}); !reflect.DeepEqual(rules[len(rules)-1],
		rbacv1.PolicyRule{APIGroups: []string{"apps"}, Resources: []string{"deployments"}, Verbs: []string{"list"}}) {
		t.Errorf("%v", rules)
	}
}
