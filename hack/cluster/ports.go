// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"strconv"
)

// These ports are below the system's ports for outgoing connections, so that no client can take the port
// of a server during its restart.
const (
	firstPort = 20000
	lastPort  = 32767
)

// reservation keeps other processes that use this package from choosing the same port.
type reservation struct {
	port int
	lock net.Listener
}

func (r reservation) release() {
	if r.lock != nil {
		_ = r.lock.Close()
	}
}

// reservePort finds a port on which nobody listens. It stays reserved until it is released or this
// process ends.
func reservePort() (reservation, error) {
	var lastErr error
	for range 100 {
		port := firstPort + rand.IntN(lastPort-firstPort+1)
		r, err := tryPort(port)
		if err == nil {
			return r, nil
		}
		lastErr = err
	}
	return reservation{}, fmt.Errorf("find a free port: %w", lastErr)
}

func tryPort(port int) (reservation, error) {
	r := reservation{port: port}
	if runtime.GOOS == "linux" {
		// An abstract socket is a lock on a name. It leaves no file and ends with the process.
		lock, err := net.Listen("unix", "@quartermaster-port-"+strconv.Itoa(port))
		if err != nil {
			return r, err
		}
		r.lock = lock
	}
	l, err := net.Listen("tcp", net.JoinHostPort(loopback, strconv.Itoa(port)))
	if err == nil {
		err = l.Close()
	}
	if err != nil {
		r.release()
		return r, err
	}
	return r, nil
}

// FreePort returns a port of 127.0.0.1 on which nobody listens, for a server that a test starts.
// Somebody may take it before that server listens; the ports of this package's own processes are
// reserved.
func FreePort() (int, error) {
	r, err := reservePort()
	r.release()
	return r.port, err
}

// portSet holds the reservations of a cluster.
type portSet []reservation

func (s *portSet) reserve() (int, error) {
	r, err := reservePort()
	if err != nil {
		return 0, err
	}
	*s = append(*s, r)
	return r.port, nil
}

func (s *portSet) release() {
	for _, r := range *s {
		r.release()
	}
	*s = nil
}
