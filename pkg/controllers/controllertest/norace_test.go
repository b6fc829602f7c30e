// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

//go:build !race

package controllertest_test

const raceDetector = false
