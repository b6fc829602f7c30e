// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build metrics

package main

import (
	"crypto/tls"

	"sigs.k8s.io/controller-runtime/pkg/metrics/filters"
	metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"
)

// metricsOptions returns those of kubebuilder's scaffold: TLS with a self-signed certificate,
// without HTTP/2, and a TokenReview and a SubjectAccessReview for each scraper.
func metricsOptions(address string) metricsserver.Options {
	return metricsserver.Options{
		BindAddress:    address,
		SecureServing:  true,
		FilterProvider: filters.WithAuthenticationAndAuthorization,
		TLSOpts:        []func(*tls.Config){func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }},
	}
}
