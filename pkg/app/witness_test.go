// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"k8s.io/klog/v2/ktesting"

	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/pkg/election/witness"
)

func TestWitnessOf(t *testing.T) {
	for name, tc := range map[string]struct {
		change  func(*Options)
		podIP   string
		address string // empty: there is none
	}{
		"a Pod that listens everywhere is reached at its IP":        {func(*Options) {}, "10.0.0.1", "10.0.0.1:10357"},
		"a Pod with an IPv6 address is reached at it":               {func(*Options) {}, "fd00::1", "[fd00::1]:10357"},
		"a process that listens at one address is reached there":    {func(o *Options) { o.Secure.BindAddress = net.IPv4(127, 0, 0, 1) }, "10.0.0.1", "127.0.0.1:10357"},
		"a process that does not know its IP is not reached":        {func(*Options) {}, "", ""},
		"a process without a secure port is not reached":            {func(o *Options) { o.Secure.BindPort = 0 }, "10.0.0.1", ""},
		"a process without an election is not reached":              {func(o *Options) { o.Election.LeaderElect = false }, "10.0.0.1", ""},
		"a process that is restricted to namespaces is not reached": {func(o *Options) { o.Generic.Namespaces = []string{"a"} }, "10.0.0.1", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("POD_IP", tc.podIP)
			o := newOptions(t)
			o.Secure.BindPort = 10357
			tc.change(o)
			w := newWitness(o, "pod_1")
			if (w == nil) != (tc.address == "") || w != nil && w.Address() != tc.address {
				t.Errorf("got %+v", w)
			}
		})
	}
}

// TestWitnessIsServedToStandbys lets a standby look at a server, which may end in good order while
// it does.
func TestWitnessIsServedToStandbys(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	address := freeAddress(t)
	o := newOptions(t)
	o.Secure.BindAddress, o.Secure.BindPort, o.Insecure.Port = address.IP, address.Port, 0
	own := newWitness(o, "leader_1")
	s, err := startServers(ctx, o, testHealth(), &auth{}, http.NotFoundHandler(), nil, own)
	if err != nil {
		t.Fatal(err)
	}
	other := witness.New(netip.MustParseAddrPort("127.0.0.1:1"), "standby_1")
	states, done := make(chan protocol.LeaderState, 10), make(chan struct{})
	looking, stop := context.WithCancel(ctx)
	go func() {
		defer close(done)
		other.Watch(looking, protocol.Watched{Holder: "leader_1", Address: own.Address()}, func(state protocol.LeaderState) { states <- state })
	}()
	if got := <-states; got != protocol.LeaderAnswers {
		t.Errorf("the standby sees %s", got)
	}
	began := time.Now()
	s.stop()
	if took := time.Since(began); took > 4*time.Second { // after 5 s the server would cut the standby off
		t.Errorf("the server waited %s for the standby", took)
	}
	stop()
	<-done
}
