// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package serving

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/apiserver/pkg/authorization/union"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// In this ConfigMap, kube-apiserver publishes the CAs of client certificates and of front proxies.
const (
	AuthenticationNamespace = "kube-system"
	AuthenticationConfigMap = "extension-apiserver-authentication"
)

// reviewTimeout is how long one TokenReview or SubjectAccessReview may take.
const reviewTimeout = 10 * time.Second

// reviewTTL is how long the answer to a TokenReview or SubjectAccessReview is used again.
const reviewTTL = 10 * time.Second

// AuthenticationConfig configures how the secure port recognizes its callers.
type AuthenticationConfig struct {
	SkipLookup   bool
	ClientCAFile string
}

// AddFlags adds the flags to fs.
func (c *AuthenticationConfig) AddFlags(fs *pflag.FlagSet) {
	fs.BoolVar(&c.SkipLookup, "authentication-skip-lookup", c.SkipLookup, ""+
		"Do not look up in the cluster (ConfigMap "+AuthenticationConfigMap+") the CAs of client certificates and of front proxies.")
	fs.StringVar(&c.ClientCAFile, "client-ca-file", c.ClientCAFile, ""+
		"The CAs of client certificates, whose common name is the user. The file is read again when it changes. "+
		"Default: the CAs of the cluster.")
}

// Reviewer delegates authentication and authorization to the API server. It can be built while the API
// server is away, so that probes are answered from the start: the CAs arrive with the first watch
// and follow every rotation.
type Reviewer struct {
	authenticator authenticator.Request
	authorizer    authorizer.Authorizer
	// clientCA has the CAs of users and of front proxies; nil if there are none.
	clientCA dynamiccertificates.CAContentProvider
	// headers follows the cluster's headers of front proxies; nil with --authentication-skip-lookup.
	headers *headerrequest.RequestHeaderAuthRequestController
}

// NewReviewer returns a Reviewer. connection returns a new configuration of a client of the built-in types,
// with a user agent that ends in name.
func NewReviewer(cfg AuthenticationConfig, connection func(name string) *rest.Config) (*Reviewer, error) {
	client, err := kubernetes.NewForConfig(withOwnLimit(connection("authentication")))
	if err != nil {
		return nil, err
	}
	a := &Reviewer{}
	// kube-apiserver's values.
	backoff := &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 5}
	authentication := authenticatorfactory.DelegatingAuthenticatorConfig{
		Anonymous:                &apiserver.AnonymousAuthConfig{Enabled: true},
		TokenAccessReviewClient:  client.AuthenticationV1(),
		TokenAccessReviewTimeout: reviewTimeout,
		WebhookRetryBackoff:      backoff,
		CacheTTL:                 reviewTTL,
	}
	if file := cfg.ClientCAFile; file != "" {
		ca, err := dynamiccertificates.NewDynamicCAContentFromFile("client-ca-file", file)
		if err != nil {
			return nil, fmt.Errorf("--client-ca-file: %w", err)
		}
		authentication.ClientCertificateCAContentProvider, a.clientCA = ca, ca
	}
	if !cfg.SkipLookup {
		if err := a.lookUp(client, &authentication); err != nil {
			return nil, fmt.Errorf("ConfigMap %s: %w", AuthenticationConfigMap, err)
		}
	}
	if a.authenticator, _, err = authentication.New(); err != nil {
		return nil, fmt.Errorf("delegated authentication: %w", err)
	}

	config := withOwnLimit(connection("authorization"))
	config.Timeout = reviewTimeout
	reviews, err := authorizationclient.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	delegated, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: reviews,
		AllowCacheTTL:             reviewTTL,
		DenyCacheTTL:              reviewTTL,
		WebhookRetryBackoff:       backoff,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("delegated authorization: %w", err)
	}
	a.authorizer, err = union.New(
		// Cluster administrators with a client certificate see everything even while the API server
		// is away.
		union.NamedAuthorizer{AuthorizerName: "groups", Authorizer: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)},
		union.NamedAuthorizer{AuthorizerName: "delegated", Authorizer: delegated},
	)
	return a, err
}

// withOwnLimit sets the limit of a client that asks about callers of the secure port.
func withOwnLimit(config *rest.Config) *rest.Config {
	// A person or a scraper waits for each review, so reviews do not share the limit of other requests.
	// Every caller of the port causes reviews, so reviews have a limit of their own, kube-apiserver's.
	config.QPS, config.Burst, config.RateLimiter = 200, 400, nil
	return config
}

// lookUp makes the authenticator trust the front proxies that the cluster publishes and, unless
// --client-ca-file names other CAs, the cluster's client certificates. Both follow every change.
func (a *Reviewer) lookUp(client kubernetes.Interface, config *authenticatorfactory.DelegatingAuthenticatorConfig) error {
	published := func(key string) (*dynamiccertificates.ConfigMapCAController, error) {
		return dynamiccertificates.NewDynamicCAFromConfigMapController(key, AuthenticationNamespace, AuthenticationConfigMap, key, client)
	}
	proxies, err := published("requestheader-client-ca-file")
	if err != nil {
		return err
	}
	if a.clientCA == nil {
		ca, err := published("client-ca-file")
		if err != nil {
			return err
		}
		config.ClientCertificateCAContentProvider, a.clientCA = ca, ca
	}
	a.clientCA = dynamiccertificates.NewUnionCAContentProvider(a.clientCA, proxies)
	a.headers = headerrequest.NewRequestHeaderAuthRequestController(AuthenticationConfigMap, AuthenticationNamespace, client,
		"requestheader-username-headers", "requestheader-uid-headers", "requestheader-group-headers",
		"requestheader-extra-headers-prefix", "requestheader-allowed-names")
	config.RequestHeaderConfig = &authenticatorfactory.RequestHeaderConfig{
		CAContentProvider:   proxies,
		AllowedClientNames:  headerrequest.StringSliceProviderFunc(a.headers.AllowedClientNames),
		UsernameHeaders:     headerrequest.StringSliceProviderFunc(a.headers.UsernameHeaders),
		UIDHeaders:          headerrequest.StringSliceProviderFunc(a.headers.UIDHeaders),
		GroupHeaders:        headerrequest.StringSliceProviderFunc(a.headers.GroupHeaders),
		ExtraHeaderPrefixes: headerrequest.StringSliceProviderFunc(a.headers.ExtraHeaderPrefixes),
	}
	return nil
}

// run keeps the cluster's headers of front proxies up to date until ctx ends. The TLS server keeps the
// CAs up to date.
func (a *Reviewer) run(ctx context.Context) {
	if a.headers != nil {
		a.headers.Run(ctx, 1)
	}
}

// protect passes a request to next if its caller is allowed to see the path.
func (a *Reviewer) protect(next http.Handler) http.Handler {
	next = genericapifilters.WithAuthorization(withoutBodyTimeout(next), authorizer.AuthorizerFunc(a.authorize), scheme.Codecs)
	next = genericapifilters.WithAuthentication(next, a.authenticator, genericapifilters.Unauthorized(scheme.Codecs), nil, nil)
	return genericapifilters.WithRequestInfo(next, &apirequest.RequestInfoFactory{})
}

// authorize decides as the authorizer does, with another error: the caller sees the error, and must not learn
// from it where the API server is.
func (a *Reviewer) authorize(ctx context.Context, attributes authorizer.Attributes) (authorizer.Decision, string, error) {
	decision, reason, err := a.authorizer.Authorize(ctx, attributes)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Cannot authorize a request", "path", attributes.GetPath(), "err", err)
		err = errors.New("cannot determine whether the request is allowed; the API server may be unreachable")
	}
	return decision, reason, err
}
