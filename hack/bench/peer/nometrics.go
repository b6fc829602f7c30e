// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !metrics

package main

import metricsserver "sigs.k8s.io/controller-runtime/pkg/metrics/server"

// metricsOptions returns options without metrics. The code that authenticates a scraper takes
// memory as soon as it is linked, so a manager without secure metrics is a build of its own.
func metricsOptions(string) metricsserver.Options { return metricsserver.Options{BindAddress: "0"} }
