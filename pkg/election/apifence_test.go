// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package election

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/go-logr/logr"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/election/apifence"
	"github.com/quartermaster-dev/quartermaster/pkg/election/display"
	"github.com/quartermaster-dev/quartermaster/pkg/election/protocol"
	"github.com/quartermaster-dev/quartermaster/pkg/election/writefence"
)

// fenceServer is an API server with the Namespace, its watch, the policy and one workload.
type fenceServer struct {
	leases *simStore
	lag    time.Duration // of the watch that the policy goes by

	mu       sync.Mutex
	version  int
	ns       *corev1.Namespace // nil: there is none
	past     []seenName
	policy   bool
	foreign  bool // another installation has a policy for the same ServiceAccount, which no dry run reaches
	rbac     bool
	down     bool
	tokenPod string // empty: the caller's
	requests int
	onPatch  func() // called before each patch
	webhook  func(ctx context.Context, dryRun bool) error
}

// seenName is a value of the annotation since a moment.
type seenName struct {
	since time.Time
	name  string
}

func newFenceServer() *fenceServer {
	s := &fenceServer{leases: freeStore(), policy: true, rbac: true}
	s.install("")
	return s
}

// install creates or replaces the Namespace.
func (s *fenceServer) install(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.set(name, "lease-leader-ns", types.UID(strconv.Itoa(s.version)))
}

func (s *fenceServer) set(leader, name string, uid types.UID) {
	s.version++
	s.ns = &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, UID: uid, ResourceVersion: strconv.Itoa(s.version)}}
	if leader != "" {
		s.ns.Annotations = map[string]string{apifence.LeaderAnnotation: leader}
	}
	s.past = append(s.past, seenName{time.Now(), leader})
}

func (s *fenceServer) setLag(lag time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.lag = lag
}

func (s *fenceServer) named() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.past[len(s.past)-1].name
}

// refuses returns the policy's words if it does not admit the Pod.
func (s *fenceServer) refuses(pod string) (words string, refused bool) {
	if !s.foreign && (!s.policy || s.ns == nil) {
		return "", false
	}
	if s.tokenPod != "" {
		pod = s.tokenPod
	}
	leader := ""
	for _, seen := range s.past {
		if !seen.since.Add(s.lag).After(time.Now()) {
			leader = seen.name
		}
	}
	return fmt.Sprintf("ValidatingAdmissionPolicy 'quartermaster-fence' with binding 'quartermaster-fence' denied request: quartermaster-fence: written by Pod %s, the leader is '%s'",
		pod, leader), !strings.HasPrefix(leader, pod+"_")
}

// namespaces is a client of one Pod.
type namespaces struct {
	*fenceServer
	pod string
}

func (c namespaces) begin(name string) (unlock func(), err error) {
	pass(time.Millisecond)
	c.mu.Lock()
	c.requests++
	switch {
	case c.down:
		err = errors.New("network is down")
	case !c.rbac:
		err = apierrors.NewForbidden(corev1.Resource("namespaces"), name, errors.New("User r cannot patch resource"))
	case c.ns == nil || c.ns.Name != name:
		err = apierrors.NewNotFound(corev1.Resource("namespaces"), name)
	}
	return c.mu.Unlock, err
}

func (c namespaces) Get(_ context.Context, name string, _ metav1.GetOptions) (*corev1.Namespace, error) {
	unlock, err := c.begin(name)
	defer unlock()
	return c.ns.DeepCopy(), err
}

func (c namespaces) Patch(ctx context.Context, name string, _ types.PatchType, patch []byte, opts metav1.PatchOptions, _ ...string) (*corev1.Namespace, error) {
	if c.onPatch != nil && len(opts.DryRun) == 0 {
		c.onPatch()
	}
	c.mu.Lock()
	webhook := c.webhook
	c.mu.Unlock()
	if webhook != nil {
		if err := webhook(ctx, len(opts.DryRun) > 0); err != nil {
			return nil, err
		}
	}
	unlock, err := c.begin(name)
	defer unlock()
	if err != nil {
		return nil, err
	}
	if len(opts.DryRun) > 0 {
		if words, _ := c.refuses(c.pod); words != "" {
			return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind(), words, nil)
		}
		return c.ns, nil
	}
	var want corev1.Namespace
	if err := json.Unmarshal(patch, &want); err != nil {
		return nil, err
	}
	if want.UID != c.ns.UID || want.ResourceVersion != c.ns.ResourceVersion {
		return nil, apierrors.NewConflict(corev1.Resource("namespaces"), name, errors.New("the object has been modified"))
	}
	c.set(want.Annotations[apifence.LeaderAnnotation], name, want.UID)
	return c.ns, nil
}

// roundTripper responds in place of a network.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }

// writes is a transport to the workload.
func (s *fenceServer) writes(pod string, limit *int) http.RoundTripper {
	return roundTripper(func(req *http.Request) (*http.Response, error) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			return nil, err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		*limit++
		if words, refused := s.refuses(pod); refused {
			return &http.Response{StatusCode: http.StatusForbidden, Header: http.Header{},
				Body: io.NopCloser(strings.NewReader(`{"kind":"Status","message":"deployments \"d\" is forbidden: ` + words + `"}`))}, nil
		}
		return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(body))}, nil
	})
}

// fenceTest is one replica, r_1 in Pod r, on the server.
type fenceTest struct {
	*fenceServer
	lock  *Lock
	sent  int // writes that the workload's API server has seen
	write func() error
}

func newFenceTest(s *fenceServer) *fenceTest {
	lock := assert.Must(NewLock(testConfig(), Candidate{Identity: "r_1", Client: newStoreClient(s.leases, "r_1"), Events: &testEvents{}, Clock: newBubbleClock(), Metrics: testMetrics(),
		Namespaces: namespaces{s, "r"}}))
	f := &fenceTest{fenceServer: s, lock: lock}
	client := &http.Client{Transport: lock.Fence(s.writes("r", &f.sent))}
	f.write = func() error {
		resp, err := client.Post("http://api/deployments", "text/plain", strings.NewReader("content"))
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		if body := assert.Must(io.ReadAll(resp.Body)); resp.StatusCode != http.StatusOK || string(body) != "content" {
			return fmt.Errorf("%d: %s", resp.StatusCode, body)
		}
		return nil
	}
	return f
}

// run lets the replica compete until ctx ends, with lead behind the fence. ended receives the error.
func (f *fenceTest) run(ctx context.Context, lead func(context.Context) error) (ended chan error) {
	ended = make(chan error, 1)
	go func() {
		err := f.lock.Run(ctx, lead)
		f.leases.background.Wait()
		ended <- err
	}()
	return ended
}

func untilStopped(ctx context.Context) error { <-ctx.Done(); return nil }

func quietly(t *testing.T) (context.Context, context.CancelFunc) {
	t.Helper()
	return context.WithCancel(klog.NewContext(t.Context(), logr.Discard()))
}

func TestServerFenceShowsItsState(t *testing.T) {
	tests := map[string]struct {
		change func(*fenceServer) // before the start
		later  func(*fenceServer) // while it leads
		leads  bool               // 30 s after the start
		want   apifence.State     // a minute after later
		named  string
	}{
		"a policy that judges rightly":                                {leads: true, want: apifence.Enforced, named: "r_1"},
		"a Namespace that names the former leader":                    {change: func(s *fenceServer) { s.install("a_1") }, leads: true, want: apifence.Enforced, named: "r_1"},
		"a Namespace that names the previous process of the same Pod": {change: func(s *fenceServer) { s.install("r_0") }, leads: true, want: apifence.Enforced, named: "r_1"},
		"an API server whose watch lags":                              {change: func(s *fenceServer) { s.lag = time.Second }, leads: true, want: apifence.Enforced, named: "r_1"},
		"no Namespace":                                                {change: func(s *fenceServer) { s.ns = nil }, leads: true, want: apifence.Absent},
		"no policy":                                                   {change: func(s *fenceServer) { s.policy = false }, leads: true, want: apifence.Absent, named: "r_1"},
		"no permission, which comes with the policy":                  {change: func(s *fenceServer) { s.rbac, s.policy = false, false }, leads: true, want: apifence.Absent},
		"a token of another Pod":                                      {change: func(s *fenceServer) { s.tokenPod = "other" }, want: apifence.Misconfigured, named: "r_1"},
		"a policy that goes by another Namespace":                     {change: func(s *fenceServer) { s.lag = time.Hour }, want: apifence.Misconfigured, named: "r_1"},
		"an API server that does not answer":                          {change: func(s *fenceServer) { s.down = true }, want: apifence.Unknown},
		"a webhook that is away, for which the API server waits": {change: func(s *fenceServer) {
			s.webhook = func(ctx context.Context, dryRun bool) error {
				if !dryRun && !pauseFor(ctx, 10*time.Second) {
					return ctx.Err()
				}
				return nil
			}
		}, leads: true, want: apifence.Enforced, named: "r_1"},
		"a webhook that refuses with the code of a missing permission": {change: func(s *fenceServer) {
			s.webhook = func(context.Context, bool) error {
				return apierrors.NewForbidden(corev1.Resource("namespaces"), "lease-leader-ns", errors.New("admission webhook denied the request"))
			}
		}, want: apifence.Unknown},
		"a policy that is installed later":       {change: func(s *fenceServer) { s.policy = false }, later: func(s *fenceServer) { s.policy = true }, leads: true, want: apifence.Enforced, named: "r_1"},
		"a Namespace that is installed later":    {change: func(s *fenceServer) { s.ns = nil }, later: func(s *fenceServer) { s.set("", "lease-leader-ns", "new") }, leads: true, want: apifence.Enforced, named: "r_1"},
		"a policy that is removed":               {later: func(s *fenceServer) { s.policy = false }, leads: true, want: apifence.Absent, named: "r_1"},
		"a Namespace that is deleted":            {later: func(s *fenceServer) { s.ns = nil }, leads: true, want: apifence.Absent, named: "r_1"},
		"a Namespace that is created again":      {later: func(s *fenceServer) { s.set("", "lease-leader-ns", "new") }, leads: true, want: apifence.Enforced, named: "r_1"},
		"an annotation that somebody has wiped":  {later: func(s *fenceServer) { s.set("", "lease-leader-ns", s.ns.UID) }, leads: true, want: apifence.Enforced, named: "r_1"},
		"an annotation that somebody has edited": {later: func(s *fenceServer) { s.set("a_1", "lease-leader-ns", s.ns.UID) }, leads: true, want: apifence.Enforced, named: "r_1"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				if tc.change != nil {
					tc.change(f.fenceServer)
				}
				ctx, stop := quietly(t)
				leads := false
				ended := f.run(ctx, func(ctx context.Context) error {
					leads = true
					return untilStopped(ctx)
				})
				pass(30 * time.Second)
				synctest.Wait()
				if leads != tc.leads {
					t.Errorf("leads: %t", leads)
				}
				if tc.later != nil {
					f.mu.Lock()
					tc.later(f.fenceServer)
					f.mu.Unlock()
				}
				pass(61 * time.Second)
				synctest.Wait()
				if got := shown(f.lock).ServerFence; got != tc.want {
					t.Errorf("found %s, want %s", got, tc.want)
				}
				if got := f.named(); got != tc.named && f.ns != nil {
					t.Errorf("named is %q, want %q", got, tc.named)
				}
				if f.requests > 100 {
					t.Errorf("%d requests in 90 s", f.requests)
				}
				stop()
				if err := <-ended; (err == nil) != tc.leads { // a holder that cannot lead gives up
					t.Error(err)
				}
			})
		})
	}
}

// TestServerFenceOfAStandby checks that whoever follows is neither named nor alarmed.
func TestServerFenceOfAStandby(t *testing.T) {
	for name, leader := range map[string]string{
		"another leads": "a_1", "nobody leads": "", "the process before it in the same Pod led last": "r_0",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				f.install(leader)
				ctx, stop := quietly(t)
				var wg sync.WaitGroup
				wg.Go(func() { f.lock.apiFence.Run(ctx) })
				pass(10 * time.Minute)
				synctest.Wait()
				if got := shown(f.lock).ServerFence; got != apifence.Enforced || f.named() != leader || f.requests > 9 {
					t.Errorf("found %s, %q is named, %d requests", got, f.named(), f.requests)
				}
				stop()
				wg.Wait()
			})
		})
	}
}

// TestNamingEndsWithTheTerm holds up the leader at each of its requests until another
// has taken the Lease and named itself. Its own fence believes in its term throughout.
func TestNamingEndsWithTheTerm(t *testing.T) {
	takeover := func(s *fenceServer) {
		s.leases.edit("b", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To("b_1") })
		s.mu.Lock()
		defer s.mu.Unlock()
		s.set("b_1", s.ns.Name, s.ns.UID)
	}
	for name, hold := range map[string]func(context.Context, *fenceTest, func()){
		"before it reads the Namespace": func(_ context.Context, _ *fenceTest, then func()) { then() },
		"before its patch":              func(_ context.Context, f *fenceTest, then func()) { f.onPatch = then },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				f.install("a_1")
				f.leases.edit("r", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To("r_1") })
				f.lock.fence.TurnOff()
				ctx, stop := quietly(t)
				defer stop()
				hold(ctx, f, sync.OnceFunc(func() { takeover(f.fenceServer) }))
				err := f.lock.apiFence.NameLeader(ctx)
				if !errors.Is(err, apifence.ErrSuperseded) || !strings.Contains(err.Error(), "b_1") || f.named() != "b_1" {
					t.Errorf("got %v, %q is named", err, f.named())
				}
			})
		})
	}
}

// TestNamingIsAtOnce counts the requests between the acquisition and lead, in which nobody
// leads: two reads, the patch and the question how it is judged. A conflict costs two reads and another
// patch.
func TestNamingIsAtOnce(t *testing.T) {
	for name, tc := range map[string]struct {
		onPatch      func(*fenceServer)
		after, reads int
	}{
		"nobody interferes": {nil, 2, 0},
		"the one before names itself late": {func(s *fenceServer) {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.set("a_1", s.ns.Name, s.ns.UID)
		}, 4, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				f.install("a_1")
				client := f.lock.candidate.Client.(*storeClient)
				taken, read := 0, 0
				f.onPatch = sync.OnceFunc(func() {
					f.mu.Lock()
					taken, read = f.requests, client.count("get")
					f.mu.Unlock()
					if tc.onPatch != nil {
						tc.onPatch(f.fenceServer)
					}
				})
				ctx, stop := quietly(t)
				err := f.lock.Run(ctx, func(context.Context) error {
					if n := f.requests - taken; n != tc.after || taken != 2 || f.named() != "r_1" {
						t.Errorf("%d requests after %d before it named itself; %q is named", n, taken, f.named())
					}
					if n := client.count("get") - read; n != tc.reads {
						t.Errorf("it has read the Lease %d times", n)
					}
					stop()
					return nil
				})
				if err != nil {
					t.Error(err)
				}
				f.leases.background.Wait()
			})
		})
	}
}

// TestNamingRetriesAsTheAPIServerSays counts the attempts of a new leader to name itself while the API
// server asks it to wait.
func TestNamingRetriesAsTheAPIServerSays(t *testing.T) {
	for name, tc := range map[string]struct{ after, most int }{
		"the API server asks for 3 s":         {3, 4}, // at 0, 3, 6 and 9 s
		"the API server asks for a long time": {100, 1},
		"the API server asks for no time":     {0, 18},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				patches := 0
				f.webhook = func(_ context.Context, dryRun bool) error {
					if !dryRun {
						patches++
					}
					return apierrors.NewTooManyRequests("busy", tc.after)
				}
				ctx, stop := quietly(t)
				ended := f.run(ctx, untilStopped)
				pass(9900 * time.Millisecond)
				synctest.Wait()
				if patches == 0 || patches > tc.most {
					t.Errorf("it has tried %d times in 10 s, want %d at most", patches, tc.most)
				}
				stop()
				if err := <-ended; err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// TestTermEndsWhenAnotherIsNamed gives the Lease to another while nothing tells the leader.
func TestTermEndsWhenAnotherIsNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFenceTest(newFenceServer())
		f.leases.edit("r", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To("r_1") })
		f.lock.fence.OpenUntil(time.Hour)
		ctx, stop := quietly(t)
		defer stop()
		ended := make(chan error, 1)
		go func() {
			_ = f.lock.apiFence.NameLeader(ctx)
			ended <- f.lock.apiFence.KeepNamed(ctx)
		}()
		pass(time.Second)
		if err := f.write(); err != nil {
			t.Errorf("the leader's write: %v", err)
		}
		f.leases.edit("b", func(l *coordinationv1.Lease) { l.Spec.HolderIdentity = ptr.To("b_1") })
		f.install("b_1")
		if err := f.write(); !errors.Is(err, writefence.ErrNotLeading) || !strings.Contains(err.Error(), "b_1") {
			t.Errorf("a write after the term: %v", err)
		}
		if err := <-ended; !errors.Is(err, apifence.ErrSuperseded) || f.named() != "b_1" {
			t.Errorf("lead ended with %v, %q is named", err, f.named())
		}
		f.lock.fence.Close()
	})
}

// TestServerFenceOfAnotherInstallation judges the ServiceAccount of a leader without a Namespace of its own.
// Refusals are a mistake of the set-up if they last; a single one may be late.
func TestServerFenceOfAnotherInstallation(t *testing.T) {
	for name, tc := range map[string]struct {
		lasts time.Duration
		ends  bool
	}{"it refuses for good": {time.Hour, true}, "it refused when it was deleted": {time.Second, false}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				f.ns, f.foreign = nil, true
				ctx, stop := quietly(t)
				defer stop()
				led := make(chan error, 1)
				ended := f.run(ctx, func(ctx context.Context) error {
					<-ctx.Done()
					led <- context.Cause(ctx)
					return nil
				})
				pass(time.Second)
				begin, alarmed := time.Now(), false
				for time.Since(begin) < time.Minute && len(led) == 0 {
					f.mu.Lock()
					f.foreign = time.Since(begin) < tc.lasts
					f.mu.Unlock()
					_ = f.write() // as a queue does after a refusal
					alarmed = alarmed || shown(f.lock).ServerFence == apifence.Misconfigured
					pass(5 * time.Second)
				}
				if !alarmed || (len(led) == 1) != tc.ends {
					t.Errorf("shown as %s: %t, the term has ended: %t", apifence.Misconfigured, alarmed, len(led) == 1)
				}
				if !tc.ends && shown(f.lock).ServerFence != apifence.Absent {
					t.Errorf("in the end: %s", shown(f.lock).ServerFence)
				}
				stop()
				if err := <-ended; (err != nil) != tc.ends {
					t.Error(err)
				}
			})
		})
	}
}

// TestServerFenceBehindAnAbsentWebhook keeps a holder from being named: that is a problem after a
// renew deadline, and after a lease duration the Lease is given up.
func TestServerFenceBehindAnAbsentWebhook(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFenceTest(newFenceServer())
		f.webhook = func(context.Context, bool) error {
			return apierrors.NewInternalError(errors.New("failed calling webhook"))
		}
		ctx, stop := quietly(t)
		defer stop()
		ended := f.run(ctx, untilStopped)
		pass(9 * time.Second)
		if err := f.lock.Problem(); err != nil {
			t.Errorf("after 9 s: %v", err)
		}
		pass(5 * time.Second)
		if err := f.lock.Problem(); err == nil || !strings.Contains(err.Error(), "failed calling webhook") {
			t.Errorf("after 14 s: %v", err)
		}
		pass(3 * time.Second)
		stop() // it would release the Lease without an error
		var lost *LostError
		if err := <-ended; !errors.As(err, &lost) || lost.Reason != protocol.ReasonCannotLead || f.leases.holder() != "" {
			t.Errorf("Run returned %v, the Lease is held by %q", err, f.leases.holder())
		}
	})
}

// TestServerFenceRefusesWrites checks what becomes of a leader's writes that the API server
// refuses, and of its writes 10 s later.
func TestServerFenceRefusesWrites(t *testing.T) {
	tests := map[string]struct {
		before         func(*fenceTest)
		refused, later bool
		ends           bool // the term, after a lease duration
		named          string
	}{
		"a name that has gone is set again": {before: func(f *fenceTest) { f.install("") }, refused: true, named: "r_1"},
		"a policy that always refuses":      {before: func(f *fenceTest) { f.setLag(time.Hour); f.install("") }, refused: true, later: true, ends: true, named: "r_1"},
		"no policy":                         {before: func(f *fenceTest) { f.mu.Lock(); defer f.mu.Unlock(); f.policy = false }, named: "r_1"},
		"an API server that lags for long behind the one that is asked": {before: func(f *fenceTest) {
			f.install("a_1")
			f.lock.apiFence.Namespaces = namespaces{newFenceServer(), "r"}
		}, refused: true, later: true, named: "a_1"},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFenceTest(newFenceServer())
				ctx, stop := quietly(t)
				ended := f.run(ctx, func(ctx context.Context) error {
					tc.before(f)
					for _, refused := range []bool{tc.refused, tc.later} {
						for range 100 {
							if err := f.write(); refused != errors.Is(err, writefence.ErrNotLeading) || !refused && err != nil {
								t.Error(err)
							}
						}
						pass(10 * time.Second)
					}
					return untilStopped(ctx)
				})
				pass(30 * time.Second)
				synctest.Wait()
				if f.named() != tc.named || f.requests > 35 {
					t.Errorf("%q is named, %d other requests", f.named(), f.requests)
				}
				stop()
				if err := <-ended; (err != nil) != tc.ends {
					t.Error(err)
				}
			})
		})
	}
}

func TestSetServerFence(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	lock := assert.Must(NewLock(testConfig(), Candidate{Identity: "r", Metrics: assert.Must(display.NewMetrics(registry))}))
	lock.SetServerFence(klog.NewContext(t.Context(), logr.Discard()), apifence.Absent)
	want := `
		# HELP quartermaster_leader_election_server_fence [ALPHA] Whether the API server refuses writes of replicas that do not hold the Lease: 1 for the state that was found, 0 for the others.
		# TYPE quartermaster_leader_election_server_fence gauge
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Absent"} 1
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Enforced"} 0
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Misconfigured"} 0
		quartermaster_leader_election_server_fence{lease_namespace="ns",name="lease",state="Unknown"} 0
	`
	if err := testutil.GatherAndCompare(registry, strings.NewReader(want), "quartermaster_leader_election_server_fence"); err != nil {
		t.Error(err)
	}
}

func TestMetricsAreRegisteredOnce(t *testing.T) {
	registry := metrics.NewKubeRegistry()
	assert.Must(display.NewMetrics(registry))
	if _, err := display.NewMetrics(registry); err == nil {
		t.Error("the metrics were registered twice")
	}
}
