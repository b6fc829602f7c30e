// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"crypto/tls"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2/ktesting"
)

func TestReviewsHaveTheirOwnLimit(t *testing.T) {
	process := connection{base: &rest.Config{Host: "https://b", QPS: -1, RateLimiter: flowcontrol.NewTokenBucketRateLimiter(1, 1)}}
	config := reviewConfig(process, "authorization")
	client, err := process.typed(config)
	if err != nil {
		t.Fatal(err)
	}
	limiter := client.AuthenticationV1().RESTClient().GetRateLimiter()
	if limiter == nil || limiter.QPS() != 200 || config.Burst != 400 {
		t.Errorf("limiter %v, burst %d", limiter, config.Burst)
	}
}

func TestNoSecurePortNeedsNoAuthorities(t *testing.T) {
	o := newOptions(t, WithoutBuiltIns())
	o.Client.Master, o.Authentication.ClientCAFile = newAPIServer(t).URL, filepath.Join(t.TempDir(), "none")
	if _, err := builtProcess(t, o); err != nil {
		t.Error(err)
	}
}

func TestReviewErrorsHideTheAPIServer(t *testing.T) {
	gone := httptest.NewServer(http.NotFoundHandler())
	gone.Close()
	o := newOptions(t)
	o.Authentication.SkipLookup = true
	o.Client.Master = gone.URL
	connection, err := newConnection(o.Client)
	if err != nil {
		t.Fatal(err)
	}
	auth, err := newAuth(o, connection)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		token string
		code  int
	}{
		"a caller without credentials":  {"", http.StatusInternalServerError},
		"a caller that nobody can know": {"Bearer x", http.StatusUnauthorized},
	} {
		t.Run(name, func(t *testing.T) {
			_, ctx := ktesting.NewTestContext(t)
			r := httptest.NewRequestWithContext(ctx, http.MethodGet, "/metrics", nil)
			r.Header.Set("Authorization", tc.token)
			w := httptest.NewRecorder()
			auth.protect(http.NotFoundHandler()).ServeHTTP(w, r)
			if address := gone.Listener.Addr().String(); w.Code != tc.code || strings.Contains(w.Body.String(), address) {
				t.Errorf("code %d, want %d; the API server is %s: %s", w.Code, tc.code, address, w.Body)
			}
		})
	}
}

// TestReviewsDoNotHoldUpTheExit stops the servers while a request waits for its review.
func TestReviewsDoNotHoldUpTheExit(t *testing.T) {
	_, ctx := ktesting.NewTestContext(t)
	address := freeAddress(t)
	reviewing, ended, over := make(chan struct{}), make(chan struct{}), make(chan struct{})
	defer close(over)
	auth := &auth{
		authenticator: authenticator.RequestFunc(func(*http.Request) (*authenticator.Response, bool, error) {
			return &authenticator.Response{User: &user.DefaultInfo{Name: user.Anonymous}}, true, nil
		}),
		authorizer: authorizer.AuthorizerFunc(func(ctx context.Context, _ authorizer.Attributes) (authorizer.Decision, string, error) {
			close(reviewing)
			select {
			case <-ctx.Done():
				close(ended)
			case <-over:
			}
			return authorizer.DecisionNoOpinion, "", ctx.Err()
		}),
	}
	o := &Options{Secure: SecureConfig{BindAddress: address.IP, BindPort: address.Port}}
	s, err := startServers(ctx, o, testHealth(), auth, http.NotFoundHandler(), nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	client := insecureClient()
	go func() {
		if response, err := client.Get("https://" + address.String() + "/metrics"); err == nil {
			_ = response.Body.Close()
		}
	}()
	<-reviewing
	s.stop()
	select {
	case <-ended:
	default:
		t.Error("the servers stopped while the review went on")
	}
}

// insecureClient returns a client that trusts every certificate.
func insecureClient() *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
}
