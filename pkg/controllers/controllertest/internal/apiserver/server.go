// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

// Package apiserver is a fake of the Kubernetes API server for tests of controllers. It speaks the
// API over HTTP, in JSON: get, list, watch, create, update, patch, server-side apply and delete, of any
// resource whose type or CustomResourceDefinition it knows.
//
// As in the API server, a role or binding may grant only what its author may do.
//
// It keeps resourceVersions, UIDs, generations, managedFields, deletionTimestamps with finalizers and the
// status as a subresource. It has no validation, no admission, no conversion between versions, no garbage
// collector and no other controller; of the defaults it has only the type of a Secret. A request that it does
// not support fails with an error that says so.
package apiserver

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/managedfields"
)

// Request is a request as the API server authorizes it.
type Request struct {
	UserAgent string
	// Verb is RBAC's verb. Patch is how a patch is written.
	Verb  string
	Patch types.PatchType

	Resource    schema.GroupResource
	Subresource string
	// Name is the name in the path; a creation has none.
	Namespace, Name string
	DryRun          bool
	Body            []byte
}

// Result is the outcome of a write.
type Result struct {
	Err error
	// Unchanged is set if nothing was written, since the object had this content already.
	Unchanged bool
}

// Hooks are called for requests. They may be called at the same time from several goroutines.
type Hooks struct {
	// Admit may refuse a request. It is called before the request reads anything.
	Admit func(Request) error
	// Wrote is called after a write or its refusal.
	Wrote func(Request, Result)
	// Unsupported is called with what the server does not support.
	Unsupported func(Request, error)
	// Holds reports whether a user may do all that the rule says.
	Holds func(userAgent string, rule rbacv1.PolicyRule) bool
	// Clock returns the time on the clock of the API server that serves a resource.
	Clock func(resource string) time.Time
}

// Timing says how long the server takes. In a bubble of testing/synctest, time passes only when
// nothing is left to do. So with a Latency that is longer than the Lag, a client's caches have every
// write before the client has the response; otherwise later.
type Timing struct {
	// Latency is how long a write takes after its effect.
	Latency time.Duration
	// Lag is how long a change takes to reach the watches of a resource; the empty name is for all others.
	Lag map[string]time.Duration
}

func (t Timing) lag(resource string) time.Duration {
	if lag, ok := t.Lag[resource]; ok {
		return lag
	}
	return t.Lag[""]
}

// Server implements http.Handler.
type Server struct {
	hooks Hooks
	types managedfields.TypeConverter

	mu        sync.Mutex
	timing    Timing
	requests  int
	resources []resource
	objects   map[key]*object
	version   int
	uids      int
	log       []change
	changed   chan struct{} // closed at the next change
	oldest    int           // the version from which on watches may begin
	expired   chan struct{} // closed when Expire ends all watches
}

// New returns a server of the resources in scheme, without any object.
func New(scheme *runtime.Scheme, hooks Hooks) *Server {
	return &Server{
		hooks: hooks, types: newTypeConverter(), resources: resourcesOf(scheme),
		objects: map[key]*object{}, version: 100, changed: make(chan struct{}), expired: make(chan struct{}),
	}
}

// SetTiming sets how long the server takes from now on. It takes no time by default.
func (s *Server) SetTiming(t Timing) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.timing = t
}

// Expire ends all watches and forgets all versions so far, so that no watch can be resumed.
func (s *Server) Expire() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.oldest = s.version
	close(s.expired)
	s.expired = make(chan struct{})
}

// Requests returns how many requests have come and how many changes were made.
func (s *Server) Requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.requests + s.version
}

// unsupportedError refuses a request that this fake does not support.
type unsupportedError struct{ *apierrors.StatusError }

func unsupported(format string, args ...any) error {
	err := apierrors.NewGenericServerResponse(http.StatusNotImplemented, "", schema.GroupResource{}, "", "", 0, false)
	err.ErrStatus.Message = "the test's API server does not support " + fmt.Sprintf(format, args...)
	return unsupportedError{err}
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if path := req.URL.Path; path == "/readyz" || path == "/livez" || path == "/healthz" {
		_, _ = w.Write([]byte("ok"))
		return
	} else if path == "/version" {
		respond(w, http.StatusOK, map[string]string{"major": "1", "minor": "36", "gitVersion": "v1.36.0"})
		return
	}
	s.mu.Lock()
	s.requests++
	document := s.discover(req.URL.Path)
	s.mu.Unlock()
	if document != nil {
		respond(w, http.StatusOK, document)
		return
	}
	c, err := s.parse(req)
	if s.hooks.Clock != nil {
		w.Header().Set("Date", s.hooks.Clock(c.Resource.Resource).UTC().Format(http.TimeFormat))
	}
	if err == nil {
		if err = s.admit(c.Request); err == nil {
			if c.Verb == "watch" {
				err = s.watch(w, c)
			} else {
				err = s.serve(w, c)
			}
		}
	}
	switch {
	case errors.Is(err, errNoPath):
		http.NotFound(w, req) // as the API server does, in plain text
	case err != nil:
		if fake := (unsupportedError{}); errors.As(err, &fake) && s.hooks.Unsupported != nil {
			s.hooks.Unsupported(c.Request, err)
		}
		fail(w, err)
	}
}

func (s *Server) admit(r Request) error {
	var err error
	if s.hooks.Admit != nil {
		err = s.hooks.Admit(r)
	}
	if err != nil && r.Verb != "get" && r.Verb != "list" && r.Verb != "watch" {
		s.wrote(r, Result{Err: err})
	}
	return err
}

func (s *Server) wrote(r Request, result Result) {
	if s.hooks.Wrote != nil {
		s.hooks.Wrote(r, result)
	}
}

// call is a parsed request.
type call struct {
	Request
	resource *resource
	query    map[string][]string
	options  metav1.ListOptions
	selector *selector
	manager  string
	force    bool
	metadata bool // the client asked for the metadata only
	ctx      <-chan struct{}
}

// parse parses a request.
func (s *Server) parse(req *http.Request) (call, error) {
	c := call{ctx: req.Context().Done(), query: req.URL.Query()}
	c.UserAgent = req.UserAgent()
	parts := strings.Split(strings.Trim(req.URL.Path, "/"), "/")
	gvr := schema.GroupVersionResource{}
	switch {
	case parts[0] == "api" && len(parts) > 2:
		gvr.Version, parts = parts[1], parts[2:]
	case parts[0] == "apis" && len(parts) > 3:
		gvr.Group, gvr.Version, parts = parts[1], parts[2], parts[3:]
	default:
		return c, errNoPath
	}
	if parts[0] == "namespaces" && len(parts) > 2 && parts[2] != "status" && parts[2] != "finalize" {
		c.Namespace, parts = parts[1], parts[2:]
	}
	gvr.Resource = parts[0]
	if len(parts) > 1 {
		c.Name = parts[1]
	}
	if len(parts) > 2 {
		c.Subresource = strings.Join(parts[2:], "/")
	}
	c.Resource = gvr.GroupResource()
	if err := c.read(req); err != nil {
		return c, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	c.resource = s.resource(gvr)
	switch {
	case c.resource == nil:
		return c, errNoPath
	case c.Subresource == "approval" && c.Resource == certificateRequests:
	case c.Subresource != "" && (c.Subresource != "status" || !c.resource.status):
		if c.resource.custom {
			return c, errNoPath
		}
		return c, unsupported("the subresource %s of %s", c.Subresource, c.Resource)
	}
	return c, nil
}

// certificateRequests have a second subresource for the status, approval.
var certificateRequests = schema.GroupResource{Group: "certificates.k8s.io", Resource: "certificatesigningrequests"}

// errNoPath is the error of a path that nothing serves.
var errNoPath = errors.New("404 page not found")

func (c *call) param(name string) string {
	if values := c.query[name]; len(values) > 0 {
		return values[0]
	}
	return ""
}

func respond(w http.ResponseWriter, code int, value any) {
	text, err := json.Marshal(value)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_, _ = w.Write(text)
}

func fail(w http.ResponseWriter, err error) {
	status := statusOf(err)
	respond(w, int(status.Code), status)
}

func statusOf(err error) metav1.Status {
	status := apierrors.NewInternalError(err).Status()
	if known := apierrors.APIStatus(nil); errors.As(err, &known) {
		status = known.Status()
	}
	status.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	return status
}

func encodeBase64(text string) string { return base64.StdEncoding.EncodeToString([]byte(text)) }
