// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"fmt"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/controllertest/internal/apiserver"
)

// testAgent is the user agent of the test's own clients.
const testAgent = "the-test"

// cacheAgent ends the user agent of the cache, which reads what is in Needs, and what controllers follow, by
// the controllers' rules. The permissions of controllers do not apply to the manager's other clients.
const cacheAgent = "informers"

// agentOf returns the last part of the user agent: the name of a controller, for its requests.
func agentOf(r apiserver.Request) string { return lastPart(r.UserAgent) }

func lastPart(agent string) string { return agent[strings.LastIndex(agent, "/")+1:] }

// forControllers reports whether a user agent is that of the cache or of a controller, which may have an HTTP
// client of its own in another cluster, with any user agent.
func forControllers(agent string) bool {
	return agent == cacheAgent || agent != testAgent && !slices.Contains(app.OwnAgents(), agent)
}

// hasEntry reports whether there is an entry of that name.
func (s *APIServer) hasEntry(name string) bool {
	return slices.ContainsFunc(s.entries, func(e controllers.Entry) bool { return e.Name == name })
}

// rules returns what a user agent may do in a namespace; empty is the cluster. The cache may do what all
// controllers may.
func (h *Host) rules(agent, namespace string) (rules []rbacv1.PolicyRule) {
	for _, e := range h.entries {
		if agent == e.Name || agent == cacheAgent {
			rules = append(rules, h.granted[e.Name][""]...)
			if namespace != "" {
				rules = append(rules, h.granted[e.Name][namespace]...)
			}
		}
	}
	return rules
}

// admit refuses what RBAC would, with the entries' permissions, and fails the test.
func (h *Host) admit(r apiserver.Request) error {
	agent := agentOf(r)
	if !forControllers(agent) {
		return nil
	}
	if !allowAll(h.rules(agent, r.Namespace), ruleOf(r)) {
		h.reportMissing(r, agent)
		return refusal(r)
	}
	return h.admitAny(r)
}

// admitAny refuses what Forbid or a hook does.
func (s *APIServer) admitAny(r apiserver.Request) error {
	s.mu.Lock()
	forbidden := slices.Contains(s.forbidden, r.Resource.String())
	s.mu.Unlock()
	if forbidden && agentOf(r) != testAgent {
		return refusal(r)
	}
	return s.callHook(r)
}

// refusal is the error with which RBAC refuses a request.
func refusal(r apiserver.Request) error {
	scope := "at the cluster scope"
	if r.Namespace != "" {
		scope = fmt.Sprintf("in the namespace %q", r.Namespace)
	}
	return apierrors.NewForbidden(r.Resource, r.Name, fmt.Errorf(
		`user "system:serviceaccount:kube-system:quartermaster" cannot %s resource %q in API group %q %s`,
		r.Verb, resourceOf(r), r.Resource.Group, scope))
}

// Forbid makes the API server refuse all requests of the manager for these resources from now on, such as
// widgets.example.com, although Permissions allow them: the roles of an installation may grant less. Watches
// that have begun go on. The last call counts: without resources, nothing is forbidden any more.
func (s *APIServer) Forbid(resources ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forbidden = resources
}

// callHook calls the hook of OnRead or OnWrite for a controller or the cache. It calls no hook for the hook's
// own requests, which would wait for the hook, and none for the manager's other clients.
func (s *APIServer) callHook(r apiserver.Request) error {
	if !forControllers(agentOf(r)) {
		return nil
	}
	reads := r.Verb == "get" || r.Verb == "list"
	s.mu.Lock()
	hook := s.onWrite
	if reads {
		hook = s.onRead
	}
	s.mu.Unlock()
	// An apply that creates is admitted twice. The second time, the server is locked and the hook was called
	// already.
	creates := r.Verb == "create" && r.Patch == types.ApplyPatchType
	if hook == nil || creates || r.Verb == "watch" || agentOf(r) == cacheAgent && r.Name == "" {
		return nil
	}
	s.inHook <- struct{}{}
	defer func() { <-s.inHook }()
	return hook(requestOf(r))
}

// holds reports whether a user agent may do all that the rule says, in every namespace.
func (h *Host) holds(agent string, rule rbacv1.PolicyRule) bool {
	agent = lastPart(agent)
	return agent == testAgent || allowAll(h.rules(agent, ""), rule)
}

// allowAll reports whether rules allow all that rule says, for each verb and resource one of them.
func allowAll(rules []rbacv1.PolicyRule, rule rbacv1.PolicyRule) bool {
	names := rule.ResourceNames
	if len(names) == 0 {
		names = []string{""}
	}
	for _, verb := range rule.Verbs {
		for _, group := range rule.APIGroups {
			for _, resource := range rule.Resources {
				for _, name := range names {
					if !slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool { return allows(r, verb, group, resource, name) }) {
						return false
					}
				}
			}
		}
		for _, url := range rule.NonResourceURLs {
			if !slices.ContainsFunc(rules, func(r rbacv1.PolicyRule) bool {
				return matches(r.Verbs, verb) && matches(r.NonResourceURLs, url)
			}) {
				return false
			}
		}
	}
	return true
}

// allows reports whether RBAC allows a request by this rule.
func allows(rule rbacv1.PolicyRule, verb, group, resource, name string) bool {
	resources := []string{resource}
	if _, sub, ok := strings.Cut(resource, "/"); ok {
		resources = append(resources, "*/"+sub)
	}
	return matches(rule.Verbs, verb) && matches(rule.APIGroups, group) && matches(rule.Resources, resources...) &&
		(len(rule.ResourceNames) == 0 || slices.Contains(rule.ResourceNames, name))
}

// matches reports whether the list of a rule has one of the values, or *.
func matches(list []string, values ...string) bool {
	return slices.ContainsFunc(list, func(item string) bool { return item == "*" || slices.Contains(values, item) })
}

// ruleOf returns the rule that allows a request and nothing else.
func ruleOf(r apiserver.Request) rbacv1.PolicyRule {
	return rbacv1.PolicyRule{Verbs: []string{r.Verb}, APIGroups: []string{r.Resource.Group}, Resources: []string{resourceOf(r)}, ResourceNames: []string{r.Name}}
}

// reportMissing fails the test because of a rule that is missing, once for each rule and controller.
func (h *Host) reportMissing(r apiserver.Request, agent string) {
	rule := ruleOf(r)
	missing := fmt.Sprintf("{APIGroups: %#v, Resources: %#v, Verbs: %#v}", rule.APIGroups, rule.Resources, rule.Verbs)
	h.mu.Lock()
	reported := h.missing[agent+missing]
	h.missing[agent+missing] = true
	h.mu.Unlock()
	if reported {
		return
	}
	if agent == cacheAgent { // what is in Needs is granted
		h.t.Errorf("Permissions do not allow what a controller follows; missing is %s", missing)
		return
	}
	h.t.Errorf("controller %s: Permissions do not allow what it does; missing is %s", agent, missing)
}

func resourceOf(r apiserver.Request) string {
	if r.Subresource == "" {
		return r.Resource.Resource
	}
	return r.Resource.Resource + "/" + r.Subresource
}
