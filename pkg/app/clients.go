// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/http"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/transport"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"golang.org/x/oauth2"
)

// clients is the one way to build a client. Which of its methods is used decides what the client may do:
// only controller's clients write for controllers, and they always pass the fence.
type clients struct {
	base   *rest.Config
	fence  func(http.RoundTripper) http.RoundTripper
	dryRun bool

	// tokens requests tokens of the controllers' own ServiceAccounts; nil without --use-service-account-credentials.
	tokens    kubernetes.Interface
	namespace string
}

func newClients(o *Options) (*clients, error) {
	base, err := baseConfig(o.Client)
	if err != nil {
		return nil, err
	}
	base.QPS, base.Burst = o.Client.QPS, int(o.Client.Burst)
	base.ContentType, base.AcceptContentTypes = o.Client.ContentType, o.Client.AcceptContentTypes
	c := &clients{base: base, dryRun: o.Generic.DryRun, namespace: o.Generic.ServiceAccountsNamespace}
	if o.Generic.UseServiceAccountTokens {
		if c.tokens, err = kubernetes.NewForConfig(c.named("service-account-tokens")); err != nil {
			return nil, err
		}
	}
	return c, nil
}

func baseConfig(c ClientConfig) (*rest.Config, error) {
	if c.Master == "" && c.Kubeconfig == "" {
		config, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("--kubeconfig is not given and this is not a Pod: %w", err)
		}
		return config, nil
	}
	config, err := clientcmd.BuildConfigFromFlags(c.Master, c.Kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("--kubeconfig, --master: %w", err)
	}
	return config, nil
}

// named returns the plain configuration under a user agent of its own, as the audit log and the API server's metrics
// show it. It is for what every replica does: reading, electing, reporting.
func (c *clients) named(name string) *rest.Config {
	return rest.AddUserAgent(rest.CopyConfig(c.base), name)
}

// controller returns the configuration of a controller: each write passes the fence, and is dry with --dry-run.
func (c *clients) controller(name string) *rest.Config {
	config := c.named(name)
	// First, so innermost: it judges when the request really leaves, not before a token was waited for.
	config.Wrap(c.fence)
	if c.tokens != nil {
		asServiceAccount(config, c.tokens, c.namespace, name)
	}
	if c.dryRun {
		config.Wrap(func(rt http.RoundTripper) http.RoundTripper { return dryRun{rt} })
	}
	return config
}

// dryRun asks the API server to carry out every write without storing it.
type dryRun struct{ next http.RoundTripper }

func (d dryRun) RoundTrip(r *http.Request) (*http.Response, error) {
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return d.next.RoundTrip(r)
	}
	r = r.Clone(r.Context())
	query := r.URL.Query()
	query.Set("dryRun", metav1.DryRunAll)
	r.URL.RawQuery = query.Encode()
	return d.next.RoundTrip(r)
}

// WrappedRoundTripper lets client-go see through to the transport, to cancel requests and to log.
func (d dryRun) WrappedRoundTripper() http.RoundTripper { return d.next }

// asServiceAccount replaces the credentials in config by tokens of a ServiceAccount, requested when needed and
// renewed before they end.
func asServiceAccount(config *rest.Config, tokens kubernetes.Interface, namespace, name string) {
	source := transport.NewCachedTokenSource(tokenSource{tokens: tokens, namespace: namespace, name: name})
	anonymous := rest.AnonymousClientConfig(config)
	anonymous.UserAgent, anonymous.WrapTransport = config.UserAgent, config.WrapTransport
	anonymous.QPS, anonymous.Burst = config.QPS, config.Burst
	anonymous.ContentConfig = config.ContentConfig
	*config = *anonymous
	config.Wrap(transport.TokenSourceWrapTransport(source))
}

type tokenSource struct {
	tokens          kubernetes.Interface
	namespace, name string
}

// Token implements oauth2.TokenSource, which knows no context.
func (s tokenSource) Token() (*oauth2.Token, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	request := &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: ptr.To[int64](3600)}}
	got, err := s.tokens.CoreV1().ServiceAccounts(s.namespace).CreateToken(ctx, s.name, request, metav1.CreateOptions{})
	if err != nil {
		return nil, fmt.Errorf("token of ServiceAccount %s/%s: %w", s.namespace, s.name, err)
	}
	return &oauth2.Token{AccessToken: got.Status.Token, TokenType: "Bearer", Expiry: got.Status.ExpirationTimestamp.Time}, nil
}

// waitForAPIServer returns when the API server says that it is ready, or with ctx's error when ctx ends first. One that
// answers but is not ready refuses requests that it will allow, since it has not read the roles yet.
func waitForAPIServer(ctx context.Context, config *rest.Config) error {
	config = rest.CopyConfig(config)
	config.Timeout = 5 * time.Second
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	waited := false
	err = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		err := client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		if err != nil && ctx.Err() == nil {
			logger.Info("Waiting for the API server", "server", config.Host, "reason", err.Error())
			waited = true
		}
		return err == nil, nil
	})
	if err == nil && waited {
		logger.Info("The API server answers", "server", config.Host)
	}
	return err
}
