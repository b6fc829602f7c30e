// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"github.com/quartermaster-dev/quartermaster/pkg/controllers"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/csrapprover"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/federation"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/replication"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/scaleschedule"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
)

// registry returns the built-in controllers in the order in which they start.
func registry() []controllers.Entry {
	return []controllers.Entry{configreload.Entry(), replication.Entry(), ttl.Entry(), federation.Entry(), csrapprover.Entry(), scaleschedule.Entry()}
}
