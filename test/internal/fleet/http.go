// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

// Get sends a request to a manager. It does not verify the certificate, which another test checks.
// token may be empty.
func Get(url, token string) (code int, body string, err error) {
	client := &http.Client{
		Timeout:   10 * time.Second,
		Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	}
	request, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	if token != "" {
		request.Header.Set("Authorization", "Bearer "+token)
	}
	response, err := client.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer func() { _ = response.Body.Close() }()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// Answers returns an error unless url returns the code and a body that contains all parts.
func Answers(url, token string, code int, parts ...string) error {
	got, body, err := Get(url, token)
	if err != nil {
		return err
	}
	if got != code {
		return fmt.Errorf("%s returned %d, want %d: %s", url, got, code, body)
	}
	for _, part := range parts {
		if !strings.Contains(body, part) {
			return fmt.Errorf("%s returned no %q: %s", url, part, body)
		}
	}
	return nil
}

// Ready returns nil if m returns 200 on /readyz.
func Ready(m *cluster.Manager) error {
	return Answers(m.InsecureURL+"/readyz?verbose", "", http.StatusOK)
}
