// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package netns runs the tests of a package in a network namespace of their own, where the addresses
// of TEST-NET-1 (192.0.2.0/24) belong to this machine. Nothing leaves the namespace, nothing
// outside can connect to it, and it ends with the tests.
//
// An API server needs such an address to be found in an EndpointSlice, which takes no loopback
// address. Neither root nor a tool is needed where users may create namespaces.
package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// insideEnv is set in the environment of the program inside of the namespace.
const insideEnv = "QUARTERMASTER_IN_NETNS"

// ErrForbidden means that this user may not create namespaces.
var ErrForbidden = errors.New("this user may not create a network namespace: run as root, or allow unprivileged user namespaces")

// Run calls main in a new network namespace and returns its exit code: it starts this program again,
// with the same arguments. Before that, it calls prepare, which still has the machine's network.
func Run(prepare func() error, main func() int) (code int, err error) {
	if os.Getenv(insideEnv) != "" {
		if err := addAddresses(); err != nil {
			return 0, fmt.Errorf("give the loopback interface its addresses: %w", err)
		}
		return main(), nil
	}
	if err := prepare(); err != nil {
		return 0, err
	}
	self, err := os.Executable()
	if err != nil {
		return 0, err
	}
	// Without a context: it ends with this program
	cmd := exec.Command(self, os.Args[1:]...)
	cmd.Env = append(os.Environ(), insideEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getgid(), Size: 1}}
	}
	runtime.LockOSThread() // Pdeathsig is sent when the thread ends
	defer runtime.UnlockOSThread()
	err = cmd.Start()
	if forbidden(err) && os.Geteuid() != 0 {
		return 0, ErrForbidden
	}
	if err != nil {
		return 0, fmt.Errorf("start the tests in a network namespace: %w", err)
	}
	err = cmd.Wait()
	if exit := new(exec.ExitError); errors.As(err, &exit) && exit.Exited() {
		return exit.ExitCode(), nil
	}
	return 0, err
}

// forbidden reports whether the kernel refuses namespaces: ENOSPC and EINVAL are its answers where
// their number is limited to zero, or where it has none.
func forbidden(err error) bool {
	return errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EINVAL)
}

// addAddresses switches the loopback interface on and gives it 192.0.2.1/24. All addresses of a
// loopback interface's subnet belong to it.
func addAddresses() error {
	socket, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(socket) }()
	interfaceUp, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	interfaceUp.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(socket, unix.SIOCSIFFLAGS, interfaceUp); err != nil {
		return err
	}
	alias, err := unix.NewIfreq("lo:1")
	if err != nil {
		return err
	}
	if err := alias.SetInet4Addr([]byte{192, 0, 2, 1}); err != nil {
		return err
	}
	return unix.IoctlIfreq(socket, unix.SIOCSIFADDR, alias) // its class is C, so the prefix is 24
}
