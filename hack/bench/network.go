// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/clientcmd/api"
)

// network separates replicas of ours from everything, and from each other.
func (b *bench) network(ctx context.Context) (err error) {
	switch {
	case !b.opts.wants(ours):
		return nil
	case os.Geteuid() != 0:
		b.progress("Only root may make network namespaces: nothing is measured")
		return nil
	}
	l, err := newLAN(ctx, b)
	if err != nil {
		return errors.Join(err, l.close())
	}
	defer func() { err = errors.Join(err, l.close()) }()
	dropped := ending{
		what: "all packets of the leader dropped",
		end:  func(p *process) error { return l.ip("link", "set", lanName+"-"+p.slot, "down") },
		goOn: func(p *process) error { return l.ip("link", "set", lanName+"-"+p.slot, "up") },
	}
	all, err := b.takeOvers(ctx, l.subject(), dropped, b.opts.drops)
	if err != nil {
		return err
	}
	b.addTakeOvers("network/15/10/2, "+dropped.what, ours, all)
	b.addStale("network/15/10/2, writes of a leader without a network when it is back", ours, all)
	return b.separation(ctx, l)
}

// separation lets two replicas not reach each other, but the API server, and counts how often another
// takes the Lease.
func (b *bench) separation(ctx context.Context, l *lan) (err error) {
	b.progress("%s: starting a leader and a standby that will not reach each other for %s", ours, b.opts.partition)
	p, err := b.startPair(ctx, l.subject())
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.stop()) }()
	if err := p.standby.awaitFence(ctx); err != nil {
		return err
	}
	if _, err := p.standby.manager.WaitForLine(ctx, `state="Answers"`); err != nil {
		return err
	}
	mark := p.lease.mark()
	for _, slot := range lanSlots {
		if err := l.ip("link", "set", lanName+"-"+slot, "type", "bridge_slave", "isolated", "on"); err != nil {
			return err
		}
	}
	if _, err := p.standby.manager.WaitForLine(ctx, `state="Silent"`); err != nil {
		return err
	}
	if err := sleep(ctx, b.opts.partition); err != nil {
		return err
	}
	b.add("network/replicas do not reach each other, for", ours, "s", b.opts.partition.Seconds())
	b.add("network/replicas do not reach each other, changes of leader", ours, "", float64(p.lease.changes(mark, p.holder)))
	return nil
}

// changes returns how often the holder has changed since mark, when it was the given one.
func (w *leaseWatch) changes(mark int, holder string) (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, v := range w.history[mark:] {
		if v.holder() != holder {
			n, holder = n+1, v.holder()
		}
	}
	return n
}

// lan is a network on this machine, in which each slot has a network namespace of its own. They reach each
// other and, by a relay at the address of the bridge, the API server, which listens on loopback.
type lan struct {
	b     *bench
	relay net.Listener
	dir   string // of the kubeconfigs and of the programs
}

const (
	lanName   = "qmbench"     // of the bridge; the namespaces and their devices append the slot
	lanPrefix = "198.18.213." // of the network for benchmarks, RFC 2544
)

var lanSlots = []string{"a", "b"}

// newLAN makes the network. What an earlier run has left behind is removed.
func newLAN(ctx context.Context, b *bench) (*lan, error) {
	l := &lan{b: b, dir: b.box.Dir}
	_ = l.close()
	if err := l.ip("link", "add", lanName, "type", "bridge"); err != nil {
		return l, err
	}
	if err := l.all([][]string{
		{"address", "add", lanPrefix + "1/24", "dev", lanName},
		{"link", "set", lanName, "up"},
	}); err != nil {
		return l, err
	}
	for _, slot := range lanSlots {
		name := lanName + "-" + slot
		if err := l.all([][]string{
			{"netns", "add", name},
			{"link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name},
			{"link", "set", name, "master", lanName, "up"},
			{"-n", name, "address", "add", address(slot) + "/24", "dev", "eth0"},
			{"-n", name, "link", "set", "eth0", "up"},
			{"-n", name, "link", "set", "lo", "up"},
		}); err != nil {
			return l, err
		}
	}
	server, err := url.Parse(b.c.AdminConfig().Host)
	if err != nil {
		return l, err
	}
	if l.relay, err = new(net.ListenConfig).Listen(ctx, "tcp", lanPrefix+"1:0"); err != nil {
		return l, err
	}
	go serveRelay(l.relay, server.Host)
	return l, nil
}

func address(slot string) string {
	return fmt.Sprintf("%s%d", lanPrefix, 2+slices.Index(lanSlots, slot))
}

// ip runs ip(8).
func (l *lan) ip(args ...string) error {
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		return fmt.Errorf("ip %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return nil
}

func (l *lan) all(commands [][]string) error {
	for _, args := range commands {
		if err := l.ip(args...); err != nil {
			return err
		}
	}
	return nil
}

func (l *lan) close() error {
	var errs []error
	if l.relay != nil {
		errs = append(errs, l.relay.Close())
	}
	for _, slot := range lanSlots { // the namespace takes its device along
		errs = append(errs, l.ip("netns", "delete", lanName+"-"+slot))
	}
	return errors.Join(append(errs, l.ip("link", "delete", lanName))...)
}

// serveRelay passes connections on to the server, byte by byte, until the listener is closed.
func serveRelay(l net.Listener, server string) {
	for {
		in, err := l.Accept()
		if err != nil {
			return
		}
		out, err := net.Dial("tcp", server)
		if err != nil {
			_ = in.Close() // as the server would
			continue
		}
		pass := func(to, from net.Conn) {
			_, _ = io.Copy(to, from)
			_, _ = to.Close(), from.Close()
		}
		go pass(out, in)
		go pass(in, out)
	}
}

// subject returns ours in the network. It logs what a standby sees of the leader.
func (l *lan) subject() subject {
	s := managerSubject(l.b, ours, "", "--v=2")
	s.start = func(b *bench, ctx context.Context, s subject, slot string, args []string) (*process, error) {
		r, err := b.replica(ctx, "net-"+slot)
		if err != nil {
			return nil, err
		}
		if r.Kubeconfig, err = l.kubeconfig(slot, r.Config().BearerTokenFile); err != nil {
			return nil, err
		}
		program := filepath.Join(l.dir, lanName+"-"+slot)
		script := fmt.Sprintf("#!/bin/sh\nexec ip netns exec %s-%s %s \"$@\"\n", lanName, slot, b.binaries.manager)
		if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
			return nil, err
		}
		p, err := b.startManager(ctx, program, "net-"+slot, append(append(slices.Clone(s.args), "--bind-address="+address(slot)), args...))
		if err == nil {
			p.readyURL = strings.Replace(p.manager.SecureURL, "127.0.0.1", address(slot), 1) + "/readyz"
		}
		return p, err
	}
	return s
}

// kubeconfig returns the kubeconfig of a slot, with which the API server is reached by the relay.
func (l *lan) kubeconfig(slot, tokenFile string) (string, error) {
	admin := l.b.c.AdminConfig()
	path := filepath.Join(l.dir, lanName+"-"+slot+".kubeconfig")
	return path, clientcmd.WriteToFile(api.Config{
		Clusters: map[string]*api.Cluster{lanName: {
			Server: "https://" + l.relay.Addr().String(), TLSServerName: "127.0.0.1", CertificateAuthorityData: admin.CAData}},
		AuthInfos:      map[string]*api.AuthInfo{lanName: {TokenFile: tokenFile}},
		Contexts:       map[string]*api.Context{lanName: {Cluster: lanName, AuthInfo: lanName}},
		CurrentContext: lanName,
	}, path)
}
