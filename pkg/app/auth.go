// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
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
	"k8s.io/apiserver/pkg/authorization/path"
	"k8s.io/apiserver/pkg/authorization/union"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	apirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	authorizationclient "k8s.io/client-go/kubernetes/typed/authorization/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// In this ConfigMap, kube-apiserver publishes the CAs of client certificates and of front proxies.
const (
	authenticationNamespace = "kube-system"
	authenticationConfigMap = "extension-apiserver-authentication"
)

// reviewTimeout is how long one TokenReview or SubjectAccessReview may take.
const reviewTimeout = 10 * time.Second

// AuthenticationConfig configures how the secure port recognizes its callers.
type AuthenticationConfig struct {
	Kubeconfig    string
	SkipLookup    bool
	CacheTTL      time.Duration
	ClientCAFile  string
	RequestHeader RequestHeaderConfig
}

// RequestHeaderConfig names the front proxies that are trusted, and the headers in which they name
// the user. Without a CAFile, both come from the cluster.
type RequestHeaderConfig struct {
	CAFile                                            string
	AllowedNames, Username, UID, Group, ExtraPrefixes []string
}

// AuthorizationConfig configures how the secure port decides what its callers may see.
type AuthorizationConfig struct {
	Kubeconfig       string
	AlwaysAllowPaths []string
	AllowTTL         time.Duration
	DenyTTL          time.Duration
}

func newAuthenticationConfig() AuthenticationConfig {
	return AuthenticationConfig{CacheTTL: 10 * time.Second, RequestHeader: RequestHeaderConfig{
		Username: []string{"x-remote-user"}, Group: []string{"x-remote-group"}, ExtraPrefixes: []string{"x-remote-extra-"},
	}}
}

func newAuthorizationConfig() AuthorizationConfig {
	return AuthorizationConfig{AllowTTL: 10 * time.Second, DenyTTL: 10 * time.Second}
}

// AddFlags adds the flags to fs.
func (c *AuthenticationConfig) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Kubeconfig, "authentication-kubeconfig", c.Kubeconfig,
		"The kubeconfig file for TokenReviews and the lookup of CAs. Default: as for everything else.")
	fs.BoolVar(&c.SkipLookup, "authentication-skip-lookup", c.SkipLookup, ""+
		"Do not look up in the cluster (ConfigMap "+authenticationConfigMap+") what --client-ca-file or "+
		"--requestheader-client-ca-file does not say.")
	fs.DurationVar(&c.CacheTTL, "authentication-token-webhook-cache-ttl", c.CacheTTL,
		"How long the answer to a TokenReview counts.")
	fs.StringVar(&c.ClientCAFile, "client-ca-file", c.ClientCAFile, ""+
		"The CAs of client certificates, whose common name is the user. It is read again when it changes. Default: those "+
		"of the cluster.")
	h := &c.RequestHeader
	fs.StringVar(&h.CAFile, "requestheader-client-ca-file", h.CAFile, ""+
		"The CAs of front proxies, which name the user in headers. It is read again when it changes. Default: those of "+
		"the cluster, and its settings in place of the other --requestheader flags.")
	fs.StringSliceVar(&h.AllowedNames, "requestheader-allowed-names", h.AllowedNames,
		"The common names of front proxies; all that --requestheader-client-ca-file signed if empty.")
	fs.StringSliceVar(&h.Username, "requestheader-username-headers", h.Username, "The headers with the user's name.")
	fs.StringSliceVar(&h.UID, "requestheader-uid-headers", h.UID, "The headers with the user's UID, such as X-Remote-Uid.")
	fs.StringSliceVar(&h.Group, "requestheader-group-headers", h.Group, "The headers with the user's groups.")
	fs.StringSliceVar(&h.ExtraPrefixes, "requestheader-extra-headers-prefix", h.ExtraPrefixes,
		"How headers with more about the user begin.")
}

// AddFlags adds the flags to fs.
func (c *AuthorizationConfig) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.Kubeconfig, "authorization-kubeconfig", c.Kubeconfig,
		"The kubeconfig file for SubjectAccessReviews. Default: as for everything else.")
	fs.StringSliceVar(&c.AlwaysAllowPaths, "authorization-always-allow-paths", c.AlwaysAllowPaths,
		"Paths that everyone may see besides the health checks; * at the end stands for all that begin so.")
	fs.DurationVar(&c.AllowTTL, "authorization-webhook-cache-authorized-ttl", c.AllowTTL,
		"How long the answer to a SubjectAccessReview counts that allows something.")
	fs.DurationVar(&c.DenyTTL, "authorization-webhook-cache-unauthorized-ttl", c.DenyTTL,
		"How long one counts that does not.")
}

// Validate returns every mistake, each with its flag. It reads no files.
func (c *AuthenticationConfig) Validate() error {
	var errs []error
	h := c.RequestHeader
	for flag, values := range map[string][]string{
		"allowed-names": h.AllowedNames, "username-headers": h.Username, "uid-headers": h.UID,
		"group-headers": h.Group, "extra-headers-prefix": h.ExtraPrefixes,
	} {
		for _, value := range values {
			if strings.TrimSpace(value) == "" {
				errs = append(errs, fmt.Errorf("--requestheader-%s: has an empty value", flag))
			}
		}
	}
	return errors.Join(errs...)
}

// Validate returns every mistake, each with its flag. It reads no files.
func (c *AuthorizationConfig) Validate() error {
	if _, err := path.NewAuthorizer(c.AlwaysAllowPaths); err != nil {
		return fmt.Errorf("--authorization-always-allow-paths: %w", err)
	}
	return nil
}

// auth delegates authentication and authorization to the API server. It can be built while the API
// server is away, so that probes are answered from the start: the CAs arrive with the first watch
// and follow every rotation.
type auth struct {
	authenticator authenticator.Request
	authorizer    authorizer.Authorizer
	// clientCA has the CAs of users and of front proxies; nil if there are none.
	clientCA dynamiccertificates.CAContentProvider
	// headers follows the cluster's headers of front proxies; nil if the flags name them.
	headers *headerrequest.RequestHeaderAuthRequestController
}

func newAuth(o *Options, c connection) (*auth, error) {
	config, err := reviewConfig(c, "authentication", o.Authentication.Kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := c.typed(config)
	if err != nil {
		return nil, fmt.Errorf("--authentication-kubeconfig: %w", err)
	}
	a := &auth{}
	// kube-apiserver's values.
	backoff := &wait.Backoff{Duration: 500 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 5}
	authentication := authenticatorfactory.DelegatingAuthenticatorConfig{
		Anonymous:                &apiserver.AnonymousAuthConfig{Enabled: true},
		TokenAccessReviewClient:  client.AuthenticationV1(),
		TokenAccessReviewTimeout: reviewTimeout,
		WebhookRetryBackoff:      backoff,
		CacheTTL:                 o.Authentication.CacheTTL,
	}
	var cas []dynamiccertificates.CAContentProvider
	if ca, err := newCA(o.Authentication, client, "client-ca-file", o.Authentication.ClientCAFile); err != nil {
		return nil, err
	} else if ca != nil {
		authentication.ClientCertificateCAContentProvider = ca
		cas = append(cas, ca)
	}
	if ca, err := newCA(o.Authentication, client, "requestheader-client-ca-file", o.Authentication.RequestHeader.CAFile); err != nil {
		return nil, err
	} else if ca != nil {
		authentication.RequestHeaderConfig = a.requestHeaders(o.Authentication.RequestHeader, client, ca)
		cas = append(cas, ca)
	}
	if len(cas) > 0 {
		a.clientCA = dynamiccertificates.NewUnionCAContentProvider(cas...)
	}
	if a.authenticator, _, err = authentication.New(); err != nil {
		return nil, fmt.Errorf("delegated authentication: %w", err)
	}

	if config, err = reviewConfig(c, "authorization", o.Authorization.Kubeconfig); err != nil {
		return nil, err
	}
	config.Timeout = reviewTimeout
	reviews, err := authorizationclient.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("--authorization-kubeconfig: %w", err)
	}
	delegated, err := authorizerfactory.DelegatingAuthorizerConfig{
		SubjectAccessReviewClient: reviews,
		AllowCacheTTL:             o.Authorization.AllowTTL,
		DenyCacheTTL:              o.Authorization.DenyTTL,
		WebhookRetryBackoff:       backoff,
	}.New()
	if err != nil {
		return nil, fmt.Errorf("delegated authorization: %w", err)
	}
	open, err := path.NewAuthorizer(o.Authorization.AlwaysAllowPaths)
	if err != nil {
		return nil, err
	}
	a.authorizer, err = union.New(
		// Cluster administrators with a client certificate see everything even while the API server
		// is away.
		union.NamedAuthorizer{AuthorizerName: "groups", Authorizer: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)},
		union.NamedAuthorizer{AuthorizerName: "paths", Authorizer: open},
		union.NamedAuthorizer{AuthorizerName: "delegated", Authorizer: delegated},
	)
	return a, err
}

// reviewConfig returns the client configuration from the flag --NAME-kubeconfig or, if that is
// empty, from c.
func reviewConfig(c connection, name, kubeconfig string) (*rest.Config, error) {
	config := c.named(name)
	if kubeconfig != "" {
		var err error
		if config, err = clientcmd.BuildConfigFromFlags("", kubeconfig); err != nil {
			return nil, fmt.Errorf("--%s-kubeconfig: %w", name, err)
		}
	}
	// A person or a scraper waits for each review, so they do not share the limit of the rest. But
	// whoever reaches the port causes them: they have kube-apiserver's limit for such reviews.
	config.QPS, config.Burst, config.RateLimiter = 200, 400, nil
	return config, nil
}

// newCA returns the CAs in file or, if that is empty, those that the cluster publishes under the
// flag's name. They follow every change. With --authentication-skip-lookup and no file it returns
// nil.
func newCA(c AuthenticationConfig, client kubernetes.Interface, flag, file string) (dynamiccertificates.CAContentProvider, error) {
	if file != "" {
		ca, err := dynamiccertificates.NewDynamicCAContentFromFile(flag, file)
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", flag, err)
		}
		return ca, nil
	}
	if c.SkipLookup {
		return nil, nil
	}
	ca, err := dynamiccertificates.NewDynamicCAFromConfigMapController(flag, authenticationNamespace, authenticationConfigMap, flag, client)
	if err != nil {
		return nil, fmt.Errorf("ConfigMap %s: %w", authenticationConfigMap, err)
	}
	return ca, nil
}

// requestHeaders returns the headers in which front proxies with a certificate of ca name the user.
// If --requestheader-client-ca-file is set, the other flags name them; otherwise the cluster does,
// and the headers follow its changes.
func (a *auth) requestHeaders(
	c RequestHeaderConfig, client kubernetes.Interface, ca dynamiccertificates.CAContentProvider,
) *authenticatorfactory.RequestHeaderConfig {
	if c.CAFile != "" {
		return &authenticatorfactory.RequestHeaderConfig{
			CAContentProvider:   ca,
			AllowedClientNames:  headerrequest.StaticStringSlice(c.AllowedNames),
			UsernameHeaders:     headerrequest.StaticStringSlice(c.Username),
			UIDHeaders:          headerrequest.StaticStringSlice(c.UID),
			GroupHeaders:        headerrequest.StaticStringSlice(c.Group),
			ExtraHeaderPrefixes: headerrequest.StaticStringSlice(c.ExtraPrefixes),
		}
	}
	a.headers = headerrequest.NewRequestHeaderAuthRequestController(authenticationConfigMap, authenticationNamespace, client,
		"requestheader-username-headers", "requestheader-uid-headers", "requestheader-group-headers",
		"requestheader-extra-headers-prefix", "requestheader-allowed-names")
	return &authenticatorfactory.RequestHeaderConfig{
		CAContentProvider:   ca,
		AllowedClientNames:  headerrequest.StringSliceProviderFunc(a.headers.AllowedClientNames),
		UsernameHeaders:     headerrequest.StringSliceProviderFunc(a.headers.UsernameHeaders),
		UIDHeaders:          headerrequest.StringSliceProviderFunc(a.headers.UIDHeaders),
		GroupHeaders:        headerrequest.StringSliceProviderFunc(a.headers.GroupHeaders),
		ExtraHeaderPrefixes: headerrequest.StringSliceProviderFunc(a.headers.ExtraHeaderPrefixes),
	}
}

// run keeps the cluster's headers of front proxies up to date until ctx ends. The TLS server does
// so with the CAs.
func (a *auth) run(ctx context.Context) {
	if a.headers != nil {
		a.headers.Run(ctx, 1)
	}
}

// protect passes a request to next if its caller is allowed to see the path.
func (a *auth) protect(next http.Handler) http.Handler {
	next = genericapifilters.WithAuthorization(unbounded(next), authorizer.AuthorizerFunc(a.authorize), scheme.Codecs)
	next = genericapifilters.WithAuthentication(next, a.authenticator, genericapifilters.Unauthorized(scheme.Codecs), nil, nil)
	return genericapifilters.WithRequestInfo(next, &apirequest.RequestInfoFactory{})
}

// authorize decides as the authorizer does. The caller sees the error, and must not learn from it
// where the API server is.
func (a *auth) authorize(ctx context.Context, attributes authorizer.Attributes) (authorizer.Decision, string, error) {
	decision, reason, err := a.authorizer.Authorize(ctx, attributes)
	if err != nil {
		klog.FromContext(ctx).V(2).Info("Failed to authorize a request", "path", attributes.GetPath(), "reason", err.Error())
		err = errors.New("it is not known whether you may see it")
	}
	return decision, reason, err
}
