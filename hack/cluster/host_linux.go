// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// withHostname calls f on a thread with another host name, which the processes that f starts inherit.
func withHostname(name string, f func() error) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the thread ends here
		err := unix.Unshare(unix.CLONE_NEWUTS)
		if err == nil {
			err = unix.Sethostname([]byte(name))
		}
		if err != nil {
			err = fmt.Errorf("give a thread the host name %s: %w", name, err)
		} else {
			err = f()
		}
		result <- err
	}()
	return <-result
}
