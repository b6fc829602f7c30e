// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"

	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/authenticatorfactory"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	apiserveroptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Where kube-apiserver publishes the CAs of client certificates and of front proxies.
const (
	authenticationNamespace = "kube-system"
	authenticationConfigMap = "extension-apiserver-authentication"
)

// auth delegates authentication and authorization to the API server. Nothing of it needs the API server when it is
// made: the CAs arrive with the first watch and follow every rotation, so that probes are answered from the start.
type auth struct {
	authenticator authenticator.Request
	authorizer    authorizer.Authorizer
	clientCAs     []dynamiccertificates.CAContentProvider
}

func newAuth(o *Options, c connection) (*auth, error) {
	config := c.named("authentication")
	if file := o.Authentication.RemoteKubeConfigFile; file != "" {
		var err error
		if config, err = clientcmd.BuildConfigFromFlags("", file); err != nil {
			return nil, fmt.Errorf("--authentication-kubeconfig: %w", err)
		}
	}
	config = rest.CopyConfig(config)
	config.QPS, config.RateLimiter = -1, nil // a person or a scraper waits for a review; caches and time-outs bound them
	client, err := c.typed(config)
	if err != nil {
		return nil, fmt.Errorf("--authentication-kubeconfig: %w", err)
	}

	a := &auth{}
	factory := authenticatorfactory.DelegatingAuthenticatorConfig{
		Anonymous:                &apiserver.AnonymousAuthConfig{Enabled: true},
		TokenAccessReviewClient:  client.AuthenticationV1(),
		TokenAccessReviewTimeout: o.Authentication.TokenRequestTimeout,
		WebhookRetryBackoff:      o.Authentication.WebhookRetryBackoff,
		CacheTTL:                 o.Authentication.CacheTTL,
	}
	if factory.ClientCertificateCAContentProvider, err = clientCA(o.Authentication, client); err != nil {
		return nil, err
	}
	if factory.RequestHeaderConfig, err = requestHeader(o.Authentication, client); err != nil {
		return nil, err
	}
	if ca := factory.ClientCertificateCAContentProvider; ca != nil {
		a.clientCAs = append(a.clientCAs, ca)
	}
	if factory.RequestHeaderConfig != nil {
		a.clientCAs = append(a.clientCAs, factory.RequestHeaderConfig.CAContentProvider)
	}
	if a.authenticator, _, err = factory.New(); err != nil {
		return nil, fmt.Errorf("delegated authentication: %w", err)
	}

	authorization := *o.Authorization
	if authorization.RemoteKubeConfigFile == "" {
		authorization.RemoteKubeConfigFile = o.Client.Kubeconfig
	}
	var info server.AuthorizationInfo
	if err := authorization.ApplyTo(&info); err != nil {
		return nil, fmt.Errorf("--authorization-kubeconfig: %w", err)
	}
	a.authorizer = info.Authorizer
	return a, nil
}

// acceptClientCertificates makes the TLS server ask for client certificates of the CAs, and keep the CAs current.
func (a *auth) acceptClientCertificates(info *server.SecureServingInfo) error {
	for _, ca := range a.clientCAs {
		if err := (&server.AuthenticationInfo{}).ApplyClientCert(ca, info); err != nil {
			return err
		}
	}
	return nil
}

func clientCA(o *apiserveroptions.DelegatingAuthenticationOptions, client kubernetes.Interface) (dynamiccertificates.CAContentProvider, error) {
	if o.ClientCert.ClientCA != "" {
		ca, err := o.ClientCert.GetClientCAContentProvider()
		if err != nil {
			return nil, fmt.Errorf("--client-ca-file: %w", err)
		}
		return ca, nil
	}
	if o.SkipInClusterLookup {
		return nil, nil
	}
	return dynamiccertificates.NewDynamicCAFromConfigMapController("client-ca",
		authenticationNamespace, authenticationConfigMap, "client-ca-file", client)
}

func requestHeader(o *apiserveroptions.DelegatingAuthenticationOptions, client kubernetes.Interface) (*authenticatorfactory.RequestHeaderConfig, error) {
	if o.RequestHeader.ClientCAFile != "" {
		config, err := o.RequestHeader.ToAuthenticationRequestHeaderConfig()
		if err != nil {
			return nil, fmt.Errorf("--requestheader-client-ca-file: %w", err)
		}
		return config, nil
	}
	if o.SkipInClusterLookup {
		return nil, nil
	}
	ca, err := dynamiccertificates.NewDynamicCAFromConfigMapController("request-header",
		authenticationNamespace, authenticationConfigMap, "requestheader-client-ca-file", client)
	if err != nil {
		return nil, err
	}
	// It runs with the CAs of the TLS server, which starts every provider that has to follow something.
	headers := &apiserveroptions.DynamicRequestHeaderController{
		ConfigMapCAController: ca,
		RequestHeaderAuthRequestController: headerrequest.NewRequestHeaderAuthRequestController(
			authenticationConfigMap, authenticationNamespace, client,
			"requestheader-username-headers", "requestheader-uid-headers", "requestheader-group-headers",
			"requestheader-extra-headers-prefix", "requestheader-allowed-names"),
	}
	return &authenticatorfactory.RequestHeaderConfig{
		CAContentProvider:   headers,
		UsernameHeaders:     headerrequest.StringSliceProviderFunc(headers.UsernameHeaders),
		UIDHeaders:          headerrequest.StringSliceProviderFunc(headers.UIDHeaders),
		GroupHeaders:        headerrequest.StringSliceProviderFunc(headers.GroupHeaders),
		ExtraHeaderPrefixes: headerrequest.StringSliceProviderFunc(headers.ExtraHeaderPrefixes),
		AllowedClientNames:  headerrequest.StringSliceProviderFunc(headers.AllowedClientNames),
	}, nil
}
