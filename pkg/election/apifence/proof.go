// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Server is one API server.
type Server struct {
	Address    string
	Namespaces NamespaceClient // of this API server and no other
}

// Servers finds the API servers.
type Servers interface {
	// List returns the API servers whose addresses are known, and how many there are.
	List(ctx context.Context) (known []Server, count int, err error)
}

const (
	proofTimeout    = 3 * time.Second // of one round
	proofBackoffMax = time.Second
)

// Prove returns when every API server refuses the predecessors of this replica, which NameLeader has named.
// Rule 11 of docs/adr/0003-leader-election.md requires this before a replica that took the Lease early may
// write. Each API server admits one Pod at a time, and the names follow each other in the order of the
// terms, so an API server that admits this replica never admits a predecessor again. Prove tells why this
// is not proved yet, and tries again until ctx ends.
func (f *Fence) Prove(ctx context.Context, report func(error)) error {
	for backoff := backoffMin; ; backoff = min(2*backoff, proofBackoffMax) {
		err := f.proveOnce(ctx)
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		report(err)
		if !f.pauseFor(ctx, backoff/2, 3*backoff/2) {
			return context.Cause(ctx)
		}
	}
}

func (f *Fence) proveOnce(ctx context.Context) error {
	if f.Servers == nil {
		return errors.New("the addresses of the API servers are not looked up")
	}
	ctx, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	known, count, err := f.Servers.List(ctx)
	switch {
	case err != nil:
		return err
	case count == 0:
		return errors.New("cannot count the API servers: no identity Leases in kube-system")
	case len(known) < count:
		return fmt.Errorf("of %d API servers, the addresses of %d are known", count, len(known))
	}
	for _, server := range known {
		reply, err := f.askVerdict(ctx, server.Namespaces)
		if reply != verdictAdmits && err == nil {
			err = errors.New(string(reply))
		}
		if err != nil {
			return fmt.Errorf("the API server at %s: %w", server.Address, err)
		}
	}
	return nil
}
