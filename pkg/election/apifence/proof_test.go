// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package apifence

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

// answers is an API server that answers a dry run with these words, or without a policy if there are none.
type answers struct {
	words string
	err   error
}

func (a answers) Get(context.Context, string, metav1.GetOptions) (*corev1.Namespace, error) {
	return nil, errors.New("not asked")
}

func (a answers) Patch(context.Context, string, types.PatchType, []byte, metav1.PatchOptions, ...string) (*corev1.Namespace, error) {
	switch {
	case a.err != nil:
		return nil, a.err
	case a.words == "":
		return &corev1.Namespace{}, nil
	}
	return nil, apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Namespace").GroupKind(), a.words, nil)
}

type servers struct {
	known []answers
	count int
	err   error
}

func (s servers) List(context.Context) (known []Server, count int, err error) {
	for i, a := range s.known {
		known = append(known, Server{Address: fmt.Sprint(i), Namespaces: a})
	}
	return known, s.count, s.err
}

func TestProofNeedsEveryAPIServer(t *testing.T) {
	yes := answers{words: "quartermaster-fence: written by Pod r, the leader is 'r_1/uid'"}
	former := answers{words: "quartermaster-fence: written by Pod r, the leader is 'a_1/uid'"}
	other := answers{words: "quartermaster-fence: written by Pod x, the leader is 'r_1/uid'"}
	for name, tc := range map[string]struct {
		servers Servers
		want    string // in the error; "" if it is proved
	}{
		"one API server that admits this replica":                 {servers{[]answers{yes}, 1, nil}, ""},
		"three API servers that admit this replica":               {servers{[]answers{yes, yes, yes}, 3, nil}, ""},
		"more addresses than API servers":                         {servers{[]answers{yes, yes}, 1, nil}, ""},
		"fewer addresses than API servers":                        {servers{[]answers{yes, yes}, 3, nil}, "of 3 API servers, the addresses of 2 are known"},
		"no address":                                              {servers{nil, 1, nil}, "the addresses of 0"},
		"an unknown number of API servers":                        {servers{[]answers{yes}, 0, nil}, "cannot count the API servers"},
		"nothing that can be read":                                {servers{nil, 0, errors.New("forbidden")}, "forbidden"},
		"nobody to ask":                                           {nil, "not looked up"},
		"one of three API servers still admits the former leader": {servers{[]answers{yes, former, yes}, 3, nil}, "at 1: does not admit this replica yet"},
		"one of three API servers has no policy":                  {servers{[]answers{yes, yes, {}}, 3, nil}, "at 2: has no fence"},
		"one of three API servers does not answer":                {servers{[]answers{yes, {err: errors.New("timeout")}, yes}, 3, nil}, "at 1"},
		"one of three API servers sees another Pod":               {servers{[]answers{yes, other, yes}, 3, nil}, "at 1: does not recognise"},
		"the API server admits another process of this Pod":       {servers{[]answers{{words: "quartermaster-fence: written by Pod r, the leader is 'r_0/uid'"}}, 1, nil}, "not admit"},
	} {
		t.Run(name, func(t *testing.T) {
			f := New(Config{Identity: "r_1", PodUID: "uid", Servers: tc.servers, RequestTimeout: time.Second})
			err := f.proveOnce(t.Context())
			if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got %v, want %q", err, tc.want)
			}
		})
	}
}

func TestDirectoryFindsTheAPIServers(t *testing.T) {
	now := time.Now()
	identity := func(name string, renewed time.Time, labels map[string]string) *coordinationv1.Lease {
		return &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name, Labels: labels},
			Spec: coordinationv1.LeaseSpec{RenewTime: ptr.To(metav1.NewMicroTime(renewed)), LeaseDurationSeconds: ptr.To[int32](3600)}}
	}
	apiServer := map[string]string{"apiserver.kubernetes.io/identity": "kube-apiserver"}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "kubernetes"},
		Ports:     []discoveryv1.EndpointPort{{Name: ptr.To("https"), Port: ptr.To[int32](6443)}, {Name: ptr.To("other"), Port: ptr.To[int32](1)}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.1"}}, {Addresses: []string{"192.0.2.2", "192.0.2.1"}}, {Addresses: []string{"2001:db8::1"}}}}
	forged := slice.DeepCopy()
	forged.Name, forged.Endpoints[0].Addresses[0] = "forged", "192.0.2.66"
	forged.Labels = map[string]string{"kubernetes.io/service-name": "kubernetes"}
	client := fake.NewClientset(slice, forged, identity("a", now, apiServer), identity("stands still", now.Add(-59*time.Minute), apiServer),
		identity("has expired", now.Add(-61*time.Minute), apiServer), identity("somebody else", now, nil))
	known, count, err := NewDirectory(&rest.Config{Host: "https://balancer"}, client).List(t.Context())
	assert.NoError(t, err)
	var addresses []string
	for _, server := range known {
		addresses = append(addresses, server.Address)
	}
	if diff := cmp.Diff([]string{"192.0.2.1:6443", "192.0.2.2:6443", "[2001:db8::1]:6443"}, addresses); diff != "" || count != 3 {
		t.Errorf("%d API servers\n%s", count, diff)
	}
}

func TestRefusalPatternIsTheFencesOnly(t *testing.T) {
	for name, text := range map[string]string{
		"a long one": strings.Repeat("x", 2*refusalLimit) + refusal,
		"one that repeats what a user has written": "ValidatingAdmissionPolicy 'echo' with binding 'echo' denied request: " +
			refusal + "Pod r",
	} {
		if refusalPattern.MatchString(text[:min(len(text), refusalLimit)]) {
			t.Errorf("%s is taken for the fence's", name)
		}
	}
}

func TestNamespaceFor(t *testing.T) {
	for want, lease := range map[string]types.NamespacedName{
		"quartermaster-leader":        {Namespace: "kube-system", Name: "quartermaster"},
		"other-leader":                {Namespace: "kube-system", Name: "other"},
		"quartermaster-leader-team-a": {Namespace: "team-a", Name: "quartermaster"},
	} {
		if got := NamespaceFor(lease); got != want {
			t.Errorf("%s: got %s, want %s", lease, got, want)
		}
	}
}
