// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"fmt"
	"strings"

	"github.com/go-logr/logr"
)

// mutationMessage is what the cache logs, with the object, when somebody has changed it.
const mutationMessage = "A controller changed an object in the cache"

// mutations is the manager's log, which goes to the test's. It fails the test if the controller
// changes an object in the cache.
type mutations struct {
	h *Host
	logr.LogSink
}

// Error implements logr.LogSink.
func (m mutations) Error(err error, message string, values ...any) {
	if message == mutationMessage {
		m.h.t.Errorf("controller %s changed an object in the cache, which others use: %s", strings.Join(m.h.names(), " or "), fmt.Sprint(values...))
	}
	m.LogSink.Error(err, message, values...)
}

// WithValues implements logr.LogSink.
func (m mutations) WithValues(values ...any) logr.LogSink {
	return mutations{m.h, m.LogSink.WithValues(values...)}
}

// WithName implements logr.LogSink.
func (m mutations) WithName(name string) logr.LogSink {
	return mutations{m.h, m.LogSink.WithName(name)}
}
