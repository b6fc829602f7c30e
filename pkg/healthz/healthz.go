// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package healthz serves named health checks that can be added while the server runs.
//
// The wire format (one path per check, ?verbose, ?exclude=NAME) is kube-apiserver's, whose library does
// the work. So probes, kubectl get --raw and dashboards for kube-apiserver work here too.
// Everyone may read these paths, so no response has a reason.
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

// Check is one named check. It returns nil when healthy. It is called for every request, so it must
// be cheap and must not wait for another system.
type Check = healthz.HealthChecker

// NamedCheck returns a Check with the given name that calls check.
func NamedCheck(name string, check func(*http.Request) error) Check {
	return healthz.NamedCheck(name, check)
}

// Handler serves one health path and a sub-path for each check. It must be created with NewHandler.
type Handler struct {
	path string

	mu     sync.Mutex // guards checks; requests read served
	checks []Check
	mux    atomic.Pointer[http.ServeMux]
}

// NewHandler returns a handler for path, such as "/livez", with the ping check and the given ones.
// It panics if two checks have the same name.
func NewHandler(path string, checks ...Check) *Handler {
	h := &Handler{path: path, checks: []Check{healthz.PingHealthz}}
	h.rebuild(h.checks)
	// The names are constants of the program, so that a duplicate shows at its first start.
	if err := h.Add(checks...); err != nil {
		panic(err)
	}
	return h
}

// Add adds checks; the handler may already be serving. If a name is taken, Add returns an error and adds
// no check.
func (h *Handler) Add(checks ...Check) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	all := slices.Clone(h.checks)
	for _, c := range checks {
		if slices.ContainsFunc(all, func(existing Check) bool { return existing.Name() == c.Name() }) {
			return fmt.Errorf("health check %q is on %s already", c.Name(), h.path)
		}
		all = append(all, c)
	}
	h.checks = all
	h.rebuild(all)
	return nil
}

// rebuild creates a new mux, since the library takes all checks of a path at once.
func (h *Handler) rebuild(checks []Check) {
	mux := http.NewServeMux()
	wrapped := make([]Check, len(checks))
	for i, check := range checks {
		wrapped[i] = NamedCheck(check.Name(), func(r *http.Request) error { return h.withholdReason(r, check) })
	}
	healthz.InstallPathHandler(mux, h.path, wrapped...)
	h.mux.Store(mux)
}

// errWithheld is the only reason that a check's own path shows.
var errWithheld = errors.New("reason withheld; --v=2 logs it, and the /debug pages of the secure port show it")

// withholdReason calls check. It returns the check's error only on the path of all checks, where the
// library logs it and does not send it. On a check's own path the library would send it, and
// everyone may read that path.
func (h *Handler) withholdReason(r *http.Request, check Check) error {
	err := check.Check(r)
	if err == nil || r.URL.Path == h.path {
		return err
	}
	klog.FromContext(r.Context()).V(2).Info("Health check failed", "path", h.path, "check", check.Name(), "err", err)
	return errWithheld
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h.mux.Load().ServeHTTP(w, r)
}
