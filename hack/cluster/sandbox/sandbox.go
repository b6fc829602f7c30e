// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package sandbox runs processes in a directory and removes both, however the program that created
// the sandbox ends: by Close, a panic, the time-out of `go test`, Ctrl-C or SIGKILL.
//
// A shell in its own session, the reaper, reads from a pipe that only this program holds. When the
// pipe ends, for whatever reason, the reaper kills the process groups of the sandbox and removes
// the directory.
package sandbox

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
)

// reaper gets the directory as $1. It first moves pids/ away: a process that has not registered by
// then can no longer start, see launcher. A killed process may still be creating a file for an
// instant, so removing is retried.
const reaper = `
trap '' HUP INT QUIT TERM
echo ready
while read -r _; do :; done
cd /
mv "$1/pids" "$1/ended" 2>/dev/null
for f in "$1"/ended/*; do
	[ -e "$f" ] && kill -s KILL -- "-${f##*/}" 2>/dev/null
done
for _ in 1 2 3 4 5 6 7 8 9 10; do
	rm -rf "$1" 2>/dev/null
	[ -e "$1" ] || exit 0
	sleep 0.2
done
`

// launcher registers its process group, whose id is its own pid, before it becomes the program.
const launcher = `: >"$0/$$" && exec "$@"`

// Sandbox is a directory and the processes that were started in it.
type Sandbox struct {
	// Dir is absolute, private to the user (mode 0700) and removed by Close.
	Dir string

	reaper *exec.Cmd
	pipe   io.Closer // its end is the signal for the reaper

	mu        sync.Mutex
	closed    bool
	processes []*Process

	closing  sync.Once
	closeErr error
}

// New creates dir, which must not exist, and starts its reaper. If dir is empty, it creates one
// below os.TempDir. The reaper keeps the files in hold open, so that a lock (flock) on one of them
// is held until the clean-up is done, even if this program is killed.
func New(ctx context.Context, dir string, hold ...*os.File) (*Sandbox, error) {
	var err error
	if dir == "" {
		dir, err = os.MkdirTemp("", "quartermaster-")
	} else if dir, err = filepath.Abs(dir); err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("make the sandbox's directory: %w", err)
	}
	s := &Sandbox{Dir: dir}
	if err := s.startReaper(ctx, hold); err != nil {
		return nil, errors.Join(fmt.Errorf("start the reaper of %s: %w", dir, err), os.RemoveAll(dir))
	}
	return s, nil
}

func (s *Sandbox) startReaper(ctx context.Context, hold []*os.File) error {
	for _, d := range []string{"pids", "logs"} {
		if err := os.Mkdir(filepath.Join(s.Dir, d), 0o700); err != nil {
			return err
		}
	}
	// The reaper does the clean-up, so it must outlive ctx.
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", "-c", reaper, "quartermaster-reaper", s.Dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.ExtraFiles = hold
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	s.reaper, s.pipe = cmd, pipe
	// Before it prints this line, the reaper has not set its traps, and Ctrl-C could kill it.
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return errors.Join(fmt.Errorf("read its first line: %w", err), pipe.Close(), cmd.Wait())
	}
	return nil
}

// Close kills all running processes, waits for them, and removes the directory. Further calls
// return the first one's result.
func (s *Sandbox) Close() error {
	s.closing.Do(func() {
		s.mu.Lock()
		s.closed = true
		processes := s.processes
		s.mu.Unlock()
		for _, p := range processes {
			p.kill()
		}
		for _, p := range processes {
			<-p.done
		}
		s.closeErr = errors.Join(s.pipe.Close(), s.reaper.Wait(), os.RemoveAll(s.Dir))
	})
	return s.closeErr
}

// Command says what to start.
type Command struct {
	Name string   // of the log file, logs/NAME.log in the sandbox; processes append to it
	Path string   // of the executable
	Args []string // without the executable's name
	Env  []string // nil: this program's environment
	Dir  string   // working directory; empty: the sandbox
}

// Start starts a process in its own process group, which Ctrl-C on the terminal does not reach.
func (s *Sandbox) Start(c Command) (*Process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, fmt.Errorf("start %s: the sandbox is closed", c.Name)
	}
	p, err := s.start(c)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", c.Name, err)
	}
	s.processes = append(s.processes, p)
	return p, nil
}

func (s *Sandbox) start(c Command) (*Process, error) {
	log := filepath.Join(s.Dir, "logs", c.Name+".log")
	out, err := os.OpenFile(log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer out.Close() // the child has its own copy
	begin, err := out.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(c.Path); err != nil {
		return nil, err // otherwise the launcher would report it only in the log
	}
	pids := filepath.Join(s.Dir, "pids")
	// Without a context: the sandbox ends its processes itself, by group
	cmd := exec.Command("/bin/sh", append([]string{"-c", launcher, pids, c.Path}, c.Args...)...)
	// A file, not a pipe: the process continues even if nobody reads.
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env, cmd.Dir = c.Env, c.Dir
	if c.Dir == "" {
		cmd.Dir = s.Dir
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &Process{Name: c.Name, Log: log, cmd: cmd, logStart: begin, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		p.err = cmd.Wait()
		// Deregister: from now on the pid may belong to somebody else.
		_ = os.Remove(filepath.Join(pids, strconv.Itoa(cmd.Process.Pid)))
	}()
	return p, nil
}
