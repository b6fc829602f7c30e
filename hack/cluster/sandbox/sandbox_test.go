// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

// ownerEnv makes this test binary act as the owner of a sandbox; its value says how the owner ends.
const ownerEnv = "SANDBOX_TEST_OWNER"

func TestMain(m *testing.M) {
	if ending := os.Getenv(ownerEnv); ending != "" {
		owner(ending)
		return
	}
	goleak.VerifyTestMain(m)
}

// owner creates a sandbox with two processes, prints them, and ends without closing it.
func owner(ending string) {
	s, err := New(context.Background(), "")
	if err != nil {
		panic(err)
	}
	pids := []string{strconv.Itoa(s.reaper.Process.Pid)}
	for _, name := range []string{"one", "two"} {
		p, err := s.Start(Command{Name: name, Path: "/bin/sh", Args: []string{"-c", "trap '' TERM INT; while :; do sleep 100; done"}})
		if err != nil {
			panic(err)
		}
		pids = append(pids, strconv.Itoa(p.PID()))
	}
	// Interrupts are handled explicitly: a program started in the background by a shell inherits
	// that they are ignored.
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGHUP)
	fmt.Println(s.Dir, strings.Join(pids, " "))
	switch ending {
	case "panic":
		panic("on purpose")
	case "exit":
		os.Exit(3)
	default:
		<-interrupted
		os.Exit(130)
	}
}

func TestSandboxEndsWithItsOwner(t *testing.T) {
	for name, signal := range map[string]syscall.Signal{
		"panic":                  0,
		"exit":                   0,
		"killed":                 syscall.SIGKILL,
		"Ctrl-C on the terminal": syscall.SIGINT,
		"terminal closed":        syscall.SIGHUP,
	} {
		t.Run(name, func(t *testing.T) {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), ownerEnv+"="+name)
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // like the foreground group of a terminal
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			if signal != 0 {
				if err := syscall.Kill(-cmd.Process.Pid, signal); err != nil {
					t.Fatal(err)
				}
			}
			if err := cmd.Wait(); err == nil {
				t.Error("the owner succeeded; it should have been killed or failed")
			}
			fields := strings.Fields(line)
			eventually(t, "the directory is removed", func() bool { return !exists(fields[0]) })
			for _, pid := range fields[1:] {
				eventually(t, "process "+pid+" is gone", func() bool { return !alive(t, pid) })
			}
		})
	}
}

func TestCloseEndsEveryProcess(t *testing.T) {
	s, err := New(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// A stubborn process with a child that the sandbox does not know.
	p, err := s.Start(Command{Name: "stubborn", Path: "/bin/sh", Args: []string{"-c", "trap '' TERM; sleep 1000 & echo $!; wait; sleep 1000"}})
	if err != nil {
		t.Fatal(err)
	}
	child, err := p.WaitForLine(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	if exists(s.Dir) {
		t.Errorf("%s is left", s.Dir)
	}
	for _, pid := range []string{strconv.Itoa(p.PID()), strconv.Itoa(s.reaper.Process.Pid)} {
		if alive(t, pid) {
			t.Errorf("process %s is left", pid)
		}
	}
	eventually(t, "the grandchild is gone", func() bool { return !alive(t, child) })
	if _, err := s.Start(Command{Name: "late", Path: "/bin/sh"}); err == nil {
		t.Error("a closed sandbox started a process")
	}
}

func TestReaperHoldsTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	lock, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Fatal(err)
	}
	s, err := New(t.Context(), "", lock)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	lock.Close() // what the kernel does when the owner is killed
	other, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); !errors.Is(err, syscall.EWOULDBLOCK) {
		t.Errorf("lock while the sandbox is open: %v, want EWOULDBLOCK", err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Flock(int(other.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		t.Errorf("lock after Close: %v", err)
	}
}

func TestLauncherStartsNothingAfterTheReaper(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	gone := filepath.Join(t.TempDir(), "pids") // as after the reaper has moved it away
	if err := exec.Command("/bin/sh", "-c", launcher, gone, "/bin/sh", "-c", ": >"+mark).Run(); err == nil {
		t.Error("the launcher reports no error")
	}
	if exists(mark) {
		t.Error("the program ran")
	}
}

// eventually fails the test if cond is not met within a generous time. The clean-up runs in another
// process.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	timeout := time.After(time.Minute)
	for !cond() {
		select {
		case <-tick.C:
		case <-timeout:
			t.Fatalf("not in a minute: %s", what)
		}
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// alive ignores zombies: an orphan's zombie waits for the init process, which is not ours.
func alive(t *testing.T, pid string) bool {
	t.Helper()
	out, err := exec.Command("ps", "-o", "stat=", "-p", pid).Output()
	if err != nil {
		return false // ps found none
	}
	return !strings.HasPrefix(strings.TrimSpace(string(out)), "Z")
}
