// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"encoding/json"
	"net/http"
	"strconv"
	"strings"

	"k8s.io/apiserver/pkg/server/flagz"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/apiserver/pkg/server/statusz"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/component-base/metrics/prometheus/slis"
)

// setVerbosity sets --v while the manager runs.
func setVerbosity(text string) (string, error) {
	level, err := strconv.ParseUint(text, 10, 31) // GlogSetter takes more than klog
	if err == nil {
		err = checkVerbosity(logsapi.VerbosityLevel(level))
	}
	if err != nil {
		return "", err
	}
	return logs.GlogSetter(text)
}

// introspectionHandler returns a handler of everything that needs RBAC permission for its nonResourceURL.
func introspectionHandler(o *Options, metricsPage http.Handler, handlers map[string]http.Handler) http.Handler {
	m := mux.NewPathRecorderMux("manager")
	m.Handle("/metrics", metricsPage)
	slis.SLIMetricsWithReset{}.Install(m)
	m.Handle("/configz", configz(o))
	flagz.Install(m, "manager", flagz.NamedFlagSetsReader{FlagSets: o.flags})
	putVerbosity := routes.StringFlagPutHandler(setVerbosity)
	routes.DebugFlags{}.Install(m, "v", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, 1<<10)
		putVerbosity(w, r)
	})
	if o.Generic.Profiling {
		routes.Profiling{}.Install(m)
	}
	for path, handler := range handlers {
		if strings.HasSuffix(path, "/") {
			m.HandlePrefix(path, handler)
		} else {
			m.Handle(path, handler)
		}
	}
	statusz.Install(m, "manager", statusz.NewRegistry(nil, statusz.WithListedPaths(m.ListedPaths())))
	return m
}

// configz returns the handler of /configz. It responds as component-base's handler does, of which a process
// has only one: tests run several managers in one process.
func configz(o *Options) http.Handler {
	config := map[string]any{groupVersion.Group: o.effectiveConfig()}
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { writeJSON(w, config) })
}

// writeJSON writes the response to a debug request.
func writeJSON(w http.ResponseWriter, value any) {
	w.Header().Set("Content-Type", "application/json")
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	if err := encoder.Encode(value); err != nil { // Details of a controller may be no JSON
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}
