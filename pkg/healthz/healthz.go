// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package healthz serves named health checks that can be added while the server runs.
//
// The wire format (one path per check, ?verbose, ?exclude=NAME) is that of kube-apiserver, whose library does the
// work: probes, kubectl get --raw and dashboards that know it work here too. Anybody may ask, so no answer has a reason.
package healthz

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/klog/v2"
)

// Check is one named check. It answers nil when healthy; it is called on every request, so it must be cheap and
// must not wait for another system.
type Check = healthz.HealthChecker

// NamedCheck makes a Check of a function.
func NamedCheck(name string, check func(*http.Request) error) Check {
	return healthz.NamedCheck(name, check)
}

// Handler serves one health path and a sub-path for each check. The zero value is not usable; see NewHandler.
type Handler struct {
	path string

	mu     sync.Mutex // guards checks; readers go through served
	checks []Check
	served atomic.Pointer[http.ServeMux]
}

// NewHandler returns a handler for path ("/livez") that serves the ping check and the given ones.
func NewHandler(path string, checks ...Check) *Handler {
	h := &Handler{path: path, checks: []Check{healthz.PingHealthz}}
	h.rebuild(h.checks)
	// The names are the caller's constants: two alike are a mistake of the program, found at its first start.
	if err := h.Add(checks...); err != nil {
		panic(err)
	}
	return h
}

// Add adds checks, also while the handler serves. A name that is taken already is an error and adds nothing.
func (h *Handler) Add(checks ...Check) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := slices.Clone(h.checks)
	for _, c := range checks {
		if slices.ContainsFunc(all, func(have Check) bool { return have.Name() == c.Name() }) {
			return fmt.Errorf("health check %q is on %s already", c.Name(), h.path)
		}
		all = append(all, c)
	}
	h.checks = all
	h.rebuild(all)
	return nil
}

// rebuild makes a new mux, since the library takes all checks of a path at once.
func (h *Handler) rebuild(checks []Check) {
	mux := http.NewServeMux()
	withheld := make([]Check, len(checks))
	for i, check := range checks {
		withheld[i] = NamedCheck(check.Name(), func(r *http.Request) error { return h.withhold(r, check) })
	}
	healthz.InstallPathHandler(mux, h.path, withheld...)
	h.served.Store(mux)
}

// errWithheld is all that a check's own path says about a failure.
var errWithheld = errors.New("reason withheld; --v=2 logs it, and the /debug pages of the secure port have it")

// withhold answers check's error to the library only on the path of all checks, where the library logs it and keeps it
// from the caller. On a check's own path it would not, and everyone may ask there.
func (h *Handler) withhold(r *http.Request, check Check) error {
	err := check.Check(r)
	if err == nil || r.URL.Path == h.path {
		return err
	}
	klog.FromContext(r.Context()).V(2).Info("Health check failed", "path", h.path, "check", check.Name(), "reason", err.Error())
	return errWithheld
}

func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.served.Load().ServeHTTP(w, r)
}
