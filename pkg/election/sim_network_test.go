// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
)

// simLink is the network between one replica and the API servers.
type simLink struct {
	mu          sync.Mutex
	lost        linkLoss
	changed     chan struct{} // closed and replaced when lost changes
	slow        time.Duration // added to the latency
	slowAnswers time.Duration // added to the latency of responses
	dead        bool          // the process is gone: nothing passes any more
}

// linkLoss says what a partition blocks.
type linkLoss int

const (
	loseNothing linkLoss = iota
	loseAll
	loseResponses
)

func newSimLink() *simLink { return &simLink{changed: make(chan struct{})} }

func (l *simLink) set(change func(*simLink)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change(l)
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *simLink) state() (linkLoss, bool, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost, l.dead, l.changed
}

// latency returns mostly a few milliseconds and sometimes a few hundred.
func (l *simLink) latency(rng *rand.Rand) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	d := 200*time.Microsecond + time.Duration(rng.Int64N(int64(4*time.Millisecond)))
	if rng.IntN(50) == 0 {
		d += time.Duration(rng.Int64N(int64(300 * time.Millisecond)))
	}
	if l.slow > 0 {
		d += time.Duration(rng.Int64N(int64(l.slow)))
	}
	return d
}

func (l *simLink) answerLatency(rng *rand.Rand) time.Duration {
	d := l.latency(rng)
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.slowAnswers > 0 {
		d += time.Duration(rng.Int64N(int64(l.slowAnswers)))
	}
	return d
}

// awaitUp waits until responses pass and reports whether they do before ctx ends.
func (l *simLink) awaitUp(ctx context.Context) bool {
	for {
		lost, dead, changed := l.state()
		if dead {
			return false
		}
		if lost == loseNothing {
			return true
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// exchange carries a request of a process to an API server and its response back. As on a real
// network, the end of ctx ends the wait, and the request only now and then. A request that a
// partition delays may be executed after the partition.
//
// A process stays connected to one API server until a request gets no answer, and now and then another.
func exchange[T any](ctx context.Context, p *simProc, verb string, op func(*simServer) (T, error)) (T, error) {
	rng := p.nextRNG("connection")
	p.mu.Lock()
	if others := p.sim.servers; !p.pinned && (p.broken || rng.IntN(30) == 0) {
		p.home, p.broken = others[rng.IntN(len(others))], false
	}
	home := p.home
	p.mu.Unlock()
	answer, err := exchangeWith(ctx, p, home, verb, op)
	if ctx.Err() != nil {
		p.mu.Lock()
		p.broken = true
		p.mu.Unlock()
	}
	return answer, err
}

// exchangeWith carries a request to a certain API server.
func exchangeWith[T any](ctx context.Context, p *simProc, server *simServer, verb string, op func(*simServer) (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	p.gate()
	p.sim.audit.onRequest(p, verb)
	rng := p.nextRNG(verb)
	out, queued, back := p.link.latency(rng), server.queueTime(verb, rng), p.link.answerLatency(rng)
	late, failFirst, hangsUp := rng.IntN(3) == 0, rng.IntN(2) == 0, rng.IntN(2) == 0
	answered := make(chan answer, 1)
	p.sim.store.background.Go(func() {
		pass(out)
		lost, dead, _ := p.link.state()
		if lost == loseAll {
			dead = !late || !p.link.awaitUp(context.Background())
		}
		if dead {
			return
		}
		if !p.sees(server) && (!late || !p.awaitSide(server)) {
			return
		}
		pass(queued)
		for left := server.keepTime(verb); left > 0; left = server.keepTime(verb) {
			pass(left)
		}
		if hangsUp && ctx.Err() != nil {
			return // the API server has noticed that nobody waits
		}
		var a answer
		err, final := p.sim.store.refusal(verb)
		// An error that is not final does not show whether the write was executed.
		if err == nil || !final && !failFirst {
			a.value, a.err = op(server)
		}
		if err != nil {
			a.err = err
		}
		pass(back)
		if lost, dead, _ := p.link.state(); dead || lost != loseNothing || !p.sees(server) {
			return
		}
		answered <- a
	})
	defer p.gate()
	var a answer
	select {
	case a = <-answered:
	case <-ctx.Done():
		a.err = ctx.Err()
	}
	if *trace {
		p.sim.log(p.identity, "%s via %d: %v", verb, server.index, a.err)
	}
	return a.value, a.err
}

// simClient is the client of one process for the Lease.
type simClient struct {
	proc *simProc
}

func (c *simClient) do(ctx context.Context, verb string, op func() (*coordinationv1.Lease, error)) (*coordinationv1.Lease, error) {
	lease, err := exchange(ctx, c.proc, verb, func(*simServer) (*coordinationv1.Lease, error) { return op() })
	if err != nil {
		return nil, err
	}
	return lease, nil
}

func (c *simClient) Get(ctx context.Context, _ string, _ metav1.GetOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, "get", c.proc.sim.store.get)
}

func (c *simClient) Create(ctx context.Context, lease *coordinationv1.Lease, _ metav1.CreateOptions) (*coordinationv1.Lease, error) {
	return c.do(ctx, "create", func() (*coordinationv1.Lease, error) { return c.proc.sim.store.create(c.proc.identity, lease) })
}

func (c *simClient) Update(ctx context.Context, lease *coordinationv1.Lease, _ metav1.UpdateOptions) (*coordinationv1.Lease, error) {
	defer c.proc.call(&c.proc.answered)
	return c.do(ctx, "update", func() (*coordinationv1.Lease, error) { return c.proc.sim.store.update(c.proc.identity, lease) })
}

func (c *simClient) Watch(ctx context.Context, opts metav1.ListOptions) (watch.Interface, error) {
	rng := c.proc.nextRNG("watch events")
	lifetime := time.Duration(ptr.Deref(opts.TimeoutSeconds, 300)) * time.Second
	return exchange(ctx, c.proc, "watch", func(server *simServer) (watch.Interface, error) {
		if rng.IntN(20) == 0 {
			return nil, apierrors.NewResourceExpired("too old resource version")
		}
		return c.proc.sim.store.watchVia(ctx, server, c.proc.link, rng, opts.ResourceVersion, lifetime), nil
	})
}

// simNamespaces is the client of one process for the Namespace that is the fence's parameter.
type simNamespaces struct {
	proc   *simProc
	server *simServer // that it asks; nil: the one it is connected to
}

func (c *simNamespaces) Get(ctx context.Context, name string, _ metav1.GetOptions) (*corev1.Namespace, error) {
	n, err := exchange(ctx, c.proc, "get namespace", func(*simServer) (*simNaming, error) { return c.proc.sim.store.getNaming(), nil })
	if err != nil {
		return nil, err
	}
	if n.absent {
		return nil, apierrors.NewNotFound(corev1.Resource("namespaces"), name)
	}
	ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name,
		UID: types.UID(strconv.FormatInt(n.uid, 10)), ResourceVersion: strconv.FormatInt(n.rv, 10)}}
	if n.leader != "" {
		ns.Annotations = map[string]string{apifence.LeaderAnnotation: n.leader}
	}
	return ns, nil
}

func (c *simNamespaces) Patch(ctx context.Context, name string, _ types.PatchType, patch []byte, opts metav1.PatchOptions,
	_ ...string) (*corev1.Namespace, error) {
	verb := "patch namespace"
	if len(opts.DryRun) > 0 {
		verb = "ask"
	}
	rng := c.proc.nextRNG("store namespace")
	op := func(server *simServer) (*corev1.Namespace, error) {
		store := c.proc.sim.store
		if err := store.webhookError(); err != nil {
			return nil, err
		}
		if verb == "ask" {
			words, _, unjudged := server.judge(c.proc)
			switch {
			case store.getNaming().absent:
				return nil, apierrors.NewNotFound(corev1.Resource("namespaces"), name)
			case unjudged:
				return &corev1.Namespace{}, nil
			}
			return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind(), words, nil)
		}
		var want corev1.Namespace
		if err := json.Unmarshal(patch, &want); err != nil {
			return nil, err
		}
		rv, _ := strconv.ParseInt(want.ResourceVersion, 10, 64)
		uid, _ := strconv.ParseInt(string(want.UID), 10, 64)
		passToStore(rng)
		c.proc.call(&c.proc.hold)
		return &want, store.name(want.Annotations[apifence.LeaderAnnotation], rv, uid)
	}
	if c.server != nil {
		return exchangeWith(ctx, c.proc, c.server, verb, op)
	}
	return exchange(ctx, c.proc, verb, op)
}

// simDirectory is what one process can find out of the API servers.
type simDirectory struct {
	proc   *simProc
	rounds int
}

// List implements apifence.Servers.
func (d *simDirectory) List(ctx context.Context) ([]apifence.Server, int, error) {
	s := d.proc.sim
	if s.waitInsteadOfProof {
		pauseFor(ctx, time.Second) // that is all the time that a round has
		if d.rounds++; d.rounds < 2 {
			return nil, 0, nil
		}
		return []apifence.Server{{Namespaces: admittingServer{d.proc}}}, 1, nil
	}
	n, err := exchange(ctx, d.proc, "list servers", func(*simServer) (int, error) { return len(s.servers), nil })
	if err != nil {
		return nil, 0, err
	}
	var known []apifence.Server
	for _, server := range s.servers[:n-s.hiddenServers] {
		known = append(known, apifence.Server{Address: strconv.Itoa(server.index), Namespaces: &simNamespaces{proc: d.proc, server: server}})
	}
	return known, n, nil
}

// admittingServer is an API server that admits whoever asks.
type admittingServer struct{ proc *simProc }

func (y admittingServer) Get(context.Context, string, metav1.GetOptions) (*corev1.Namespace, error) {
	return nil, errors.New("not asked")
}

func (y admittingServer) Patch(context.Context, string, types.PatchType, []byte, metav1.PatchOptions, ...string) (*corev1.Namespace, error) {
	words := fmt.Sprintf("quartermaster-fence: written by Pod %s, the leader is '%s'", y.proc.pod, y.proc.identity)
	return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind(), words, nil)
}
