// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package builtin is the registry of Quartermaster's own controllers. A build that does not import it does
// not contain them.
package builtin

import (
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

// Entries returns the built-in controllers in the order in which they are built.
func Entries() []controllers.Entry {
	return []controllers.Entry{configreload.Entry(), replication.Entry(), ttl.Entry(), federation.Entry(), csrapprover.Entry(), scaleschedule.Entry()}
}
