// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"
)

// pollInterval is how often a log file is checked for new lines.
const pollInterval = 20 * time.Millisecond

// Process is a process of a Sandbox. Its methods may be called from several goroutines.
type Process struct {
	Name string
	Log  string // the file that gets stdout and stderr

	cmd      *exec.Cmd
	logStart int64         // size of the log when the process started
	done     chan struct{} // closed after it has ended and was waited for
	err      error         // of Wait; read it only after done
}

// PID returns the process id, which is also the id of the process group.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done returns a channel that is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Signal sends sig to the process group. It is no error if the process has ended.
func (p *Process) Signal(sig syscall.Signal) error {
	select {
	case <-p.done:
		return nil
	default:
	}
	// Between exit and Wait the group still exists as a zombie, so ESRCH can only mean that Wait
	// has just returned.
	if err := syscall.Kill(-p.PID(), sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %v to %s: %w", sig, p.Name, err)
	}
	return nil
}

func (p *Process) kill() { _ = p.Signal(syscall.SIGKILL) }

// Wait waits for the end of the process. It returns nil for exit code 0, otherwise an
// *exec.ExitError. If ctx ends first, it returns the cause, and the process continues.
func (p *Process) Wait(ctx context.Context) error {
	select {
	case <-p.done:
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("wait for %s to end: %w", p.Name, context.Cause(ctx))
	}
}

// ExitCode returns the exit code of the ended process: -1 while it runs, 128 + the signal if a
// signal ended it.
func (p *Process) ExitCode() int {
	select {
	case <-p.done:
	default:
		return -1
	}
	if s, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && s.Signaled() {
		return 128 + int(s.Signal())
	}
	return p.cmd.ProcessState.ExitCode()
}

// Stop sends SIGTERM, sends SIGKILL after the grace period or when ctx ends, and waits for the end.
// It returns an error for a kill, but not for an exit code.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, grace)
	defer cancel()
	select {
	case <-p.done:
		return nil
	case <-ctx.Done():
		p.kill()
		<-p.done
		return fmt.Errorf("%s did not end within %v of SIGTERM and was killed", p.Name, grace)
	}
}

// Kill sends SIGKILL and waits for the end.
func (p *Process) Kill() {
	p.kill()
	<-p.done
}

// Lines yields the lines of the process's log, without the newline, from its start until the
// process or ctx has ended.
func (p *Process) Lines(ctx context.Context) iter.Seq[string] {
	return func(yield func(string) bool) {
		f, err := os.Open(p.Log)
		if err != nil {
			return // the file was removed with the sandbox
		}
		defer f.Close()
		if _, err := f.Seek(p.logStart, io.SeekStart); err != nil {
			return
		}
		tick := time.NewTicker(pollInterval)
		defer tick.Stop()
		var rest []byte
		for ended := false; ; {
			chunk, err := io.ReadAll(f)
			if err != nil {
				return
			}
			rest = append(rest, chunk...)
			for {
				line, remainder, found := bytes.Cut(rest, []byte("\n"))
				if !found {
					break
				}
				if !yield(string(line)) {
					return
				}
				rest = remainder
			}
			if ended {
				if len(rest) > 0 {
					yield(string(rest))
				}
				return
			}
			select {
			case <-ctx.Done():
				return
			case <-p.done:
				ended = true // read once more, for its last output
			case <-tick.C:
			}
		}
	}
}

// WaitForLine returns the first line of the process's log that contains text, also if it was logged
// before the call. It returns an error if the process or ctx ends before.
func (p *Process) WaitForLine(ctx context.Context, text string) (string, error) {
	for line := range p.Lines(ctx) {
		if strings.Contains(line, text) {
			return line, nil
		}
	}
	reason := "it ended"
	if ctx.Err() != nil {
		reason = context.Cause(ctx).Error()
	}
	return "", fmt.Errorf("wait for %q in the log of %s: %s; its last lines:\n%s", text, p.Name, reason, p.Tail(20))
}

// Tail returns the last n lines of the process's log, for error messages.
func (p *Process) Tail(n int) string {
	log, err := os.ReadFile(p.Log)
	if err != nil || int64(len(log)) < p.logStart {
		return "(no log)"
	}
	lines := strings.Split(strings.TrimRight(string(log[p.logStart:]), "\n"), "\n")
	if len(lines) > n {
		lines = lines[len(lines)-n:]
	}
	return strings.Join(lines, "\n")
}
