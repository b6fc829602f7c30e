// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package ttl

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
	"github.com/quartermaster-dev/quartermaster/pkg/informers"
)

var (
	pods    = policy.Type{GroupVersionResource: schema.GroupVersionResource{Version: "v1", Resource: "pods"}, Namespaced: true}
	widgets = policy.Type{GroupVersionResource: schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}, Namespaced: true}
)

func TestDiscoveryFindsDeletableTypes(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := map[string]string{
			"/api":  `{"kind":"APIVersions","versions":["v1"]}`,
			"/apis": `{"kind":"APIGroupList","apiVersion":"v1","groups":[{"name":"example.com","versions":[{"groupVersion":"example.com/v1","version":"v1"}]}]}`,
			"/api/v1": `{"kind":"APIResourceList","groupVersion":"v1","resources":[
				{"name":"pods","kind":"Pod","namespaced":true,"verbs":["get","list","watch","delete"]},
				{"name":"pods/status","kind":"Pod","namespaced":true,"verbs":["get","list","watch","delete"]},
				{"name":"bindings","kind":"Binding","namespaced":true,"verbs":["deletecollection","get","list","watch"]}]}`,
		}[r.URL.Path]
		w.Header().Set("Content-Type", "application/json")
		if body == "" {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprint(w, body)
	}))
	defer server.Close()
	types, downGroups, err := discover(kubernetes.NewForConfigOrDie(&rest.Config{Host: server.URL}).Discovery())
	if len(types) != 1 || types[0].GroupVersionResource != pods.GroupVersionResource || !types[0].Namespaced || len(downGroups) != 1 || downGroups[0] != "example.com" || err == nil {
		t.Errorf("%v, %v, %v", types, downGroups, err)
	}
}

// newFollower returns a follower of types whose objects never come, since no API server answers. It follows
// what accept permits.
func newFollower(t *testing.T, set *rules.Set, accept func(informers.Need) error) *follower {
	t.Helper()
	caches, err := informers.NewCaches(metrics.NewKubeRegistry())
	assert.NoError(t, err)
	cluster, err := caches.AddCluster(informers.CacheConfig{Scheme: scheme.Scheme}, &rest.Config{Host: "http://127.0.0.1:1"}, func(string) {})
	assert.NoError(t, err)
	t.Cleanup(cluster.Shutdown)
	follow := func(need informers.Need, _ func(old, current metav1.Object, initial bool)) (*informers.Following[metav1.Object], error) {
		if err := accept(need); err != nil {
			return nil, err
		}
		return informers.Follow[metav1.Object](cluster.ForController(Name), need)
	}
	cfg := NewConfig()
	return &follower{controller: &controller{cfg: cfg, options: cfg.Policy(), rules: set, follow: follow, types: map[schema.GroupResource]*followedType{}}}
}

func TestTypeWithAProblemDisturbsNoOther(t *testing.T) {
	followed, unfollowable := map[string]string{}, ""
	f := newFollower(t, nil, func(need informers.Need) error {
		if need.Resource.Resource == unfollowable {
			return errors.New("cannot be followed")
		}
		followed[need.Resource.Resource] = need.Resource.Version
		return nil
	})
	other := widgets
	other.Version = "v2"
	for _, step := range []struct {
		name         string
		types        []policy.Type
		downGroups   []string
		unfollowable string
		want         int
	}{
		{"one cannot be followed", []policy.Type{pods, widgets}, nil, "widgets", 1},
		{"it can be again", []policy.Type{pods, widgets}, nil, "", 2},
		{"its group does not answer", []policy.Type{pods}, []string{"example.com"}, "", 2},
		{"its version has changed", []policy.Type{pods, other}, nil, "", 2},
		{"it is gone", []policy.Type{pods}, nil, "", 1},
	} {
		unfollowable = step.unfollowable
		f.apply(t.Context(), step.types, step.downGroups)
		assert.Equal(t, step.name+": types that are followed", step.want, len(f.types))
	}
	assert.Equal(t, "version that is followed", "v2", followed["widgets"])
}

// The expressions of a rule are about one version.
func TestTypeIsFollowedInTheVersionOfItsRule(t *testing.T) {
	set, err := rules.Parse([]byte("rules: [{name: r, resources: [widgets.v1.example.com], ttl: 1h}]"))
	assert.NoError(t, err)
	var followed []informers.Need
	f := newFollower(t, set, func(need informers.Need) error { followed = append(followed, need); return nil })
	preferred := widgets
	preferred.Version = "v2"
	for range 2 {
		f.apply(t.Context(), []policy.Type{preferred}, nil)
	}
	if len(followed) != 1 || followed[0].Resource != widgets.GroupVersionResource || reflect.ValueOf(followed[0].Digest).IsZero() {
		t.Errorf("followed are %v", followed)
	}
}

// An object that goes while the cache is looked through gets no record, since no event would remove it.
func TestWhatIsGoneIsNotRecorded(t *testing.T) {
	followed, err := newFollower(t, nil, func(informers.Need) error { return nil }).followType(t.Context(), pods)
	assert.NoError(t, err)
	name := cache.NewObjectName("shop", "p")
	if followed.addRecord(name, time.Time{}) || followed.records[name] != nil {
		t.Error("it is recorded")
	}
	followed.stop()
	if followed.put(name, &dueRecord{}); followed.records != nil {
		t.Error("a type that has been stopped has records")
	}
}

// notLeading is what the fence returns.
type notLeading struct{ error }

func (notLeading) NotLeading() bool { return true }

func TestLostLeadershipIsNoFailure(t *testing.T) {
	rec := &dueRecord{}
	c := &controller{} // nothing of it is used: no Event, no metric
	if after, err := c.handleFailure(t.Context(), objectKey{}, rec, nil, "1", time.Time{}, "delete", notLeading{errors.New("no")}); after != 0 || err == nil || rec.failures != 0 {
		t.Errorf("%v, %v, %d failures", after, err, rec.failures)
	}
}

// TestSameDeadlineTellsASuccessorApart has a successor that a watch which was away shows as an update.
func TestSameDeadlineTellsASuccessorApart(t *testing.T) {
	obj := &metav1.ObjectMeta{UID: "1", Annotations: map[string]string{policy.NativeExpires: "x"}}
	successor := obj.DeepCopy()
	successor.UID = "2"
	if sameDeadline(obj, successor, nil) || !sameDeadline(obj, obj.DeepCopy(), []string{policy.NativeExpires}) {
		t.Error("another object is the same, or the same is another")
	}
}
