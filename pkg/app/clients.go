// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/flowcontrol"
	"k8s.io/klog/v2"
)

// clientConfigs makes the configurations of this process's clients of the API server. Its own clients do what
// every replica does: read, elect, record Events.
type clientConfigs struct {
	base *rest.Config
	// contentType is --kube-api-content-type. It applies to clients of built-in types only; others
	// speak JSON.
	contentType string
}

func newClientConfigs(o ClientConfig) (clientConfigs, error) {
	base, err := baseConfig(o)
	if err != nil {
		return clientConfigs{}, err
	}
	base.ContentType = runtime.ContentTypeJSON
	base.QPS = -1
	if o.QPS > 0 {
		// The copies of base share this limiter, so that the limit is per process.
		base.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(o.QPS, int(o.Burst))
	}
	return clientConfigs{base, o.ContentType}, nil
}

func baseConfig(c ClientConfig) (*rest.Config, error) {
	if c.RESTConfig != nil {
		return rest.CopyConfig(c.RESTConfig), nil
	}
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

// named returns the configuration with a user agent of its own, which the audit log and the API
// server's metrics show.
func (c clientConfigs) named(name string) *rest.Config {
	return rest.AddUserAgent(rest.CopyConfig(c.base), name)
}

// builtIn returns a copy of config for a client of built-in types only.
func (c clientConfigs) builtIn(config *rest.Config) *rest.Config {
	config = rest.CopyConfig(config)
	config.ContentType = c.contentType
	config.AcceptContentTypes = c.contentType + "," + runtime.ContentTypeJSON
	return config
}

// typed returns a client of the built-in types.
func (c clientConfigs) typed(config *rest.Config) (*kubernetes.Clientset, error) {
	return kubernetes.NewForConfig(c.builtIn(config))
}

// clientFactory makes the clients of controllers. No other client writes for them, and every write passes the
// fence.
type clientFactory struct {
	clientConfigs
	fence  func(http.RoundTripper) http.RoundTripper
	dryRun *dryRun // nil without --dry-run
	mapper *kindMapper
}

func newClientFactory(o *Options, c clientConfigs, fence func(http.RoundTripper) http.RoundTripper) (*clientFactory, error) {
	f := &clientFactory{clientConfigs: c, fence: fence}
	var err error
	if f.mapper, err = newKindMapper(c.named("discovery")); err != nil {
		return nil, err
	}
	if o.Generic.DryRun {
		if f.dryRun, err = newDryRun(c); err != nil {
			return nil, fmt.Errorf("--dry-run: %w", err)
		}
		f.contentType = runtime.ContentTypeJSON // see deleteOptions
	}
	return f, nil
}

// forController returns the configuration of a controller's clients: each write passes the fence and, with
// --dry-run, is a dry run.
func (f *clientFactory) forController(name string) *rest.Config {
	config := f.named(name)
	// The wrapper that is added first is the innermost: the fence is checked when the request is sent.
	config.Wrap(withoutLongWaits)
	config.Wrap(f.fence)
	if f.dryRun != nil {
		config.Wrap(f.dryRun.wrap)
	}
	return config
}

// longestWait is how long client-go may hold a worker before it sends a request again, ten times at most. The
// header Retry-After, which a webhook may set, says how long. An API server that is busy says 1 s. For a
// longer wait, the key goes back to the queue.
const longestWait = 1 // seconds

// withoutLongWaits removes a Retry-After above longestWait. The error of a webhook's refusal still says how
// long to wait, since its body is a Status. After a text, as of an API server that has too many requests,
// the back-off of the key decides.
func withoutLongWaits(next http.RoundTripper) http.RoundTripper {
	return transport{next, func(r *http.Request) (*http.Response, error) {
		resp, err := next.RoundTrip(r)
		if err == nil && resp.StatusCode >= 400 { // a lower status may be the answer of a proxied Pod
			if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && seconds > longestWait {
				resp.Header.Del("Retry-After")
			}
		}
		return resp, err
	}}
}

// transport sends requests by a function that passes them to next.
type transport struct {
	next http.RoundTripper
	send func(*http.Request) (*http.Response, error)
}

// RoundTrip implements http.RoundTripper.
func (t transport) RoundTrip(r *http.Request) (*http.Response, error) { return t.send(r) }

// WrappedRoundTripper implements net.RoundTripperWrapper.
func (t transport) WrappedRoundTripper() http.RoundTripper { return t.next }

// maxRefusals is how often in a row, once a second, an API server may refuse to say whether it is ready.
const maxRefusals = 10

// waitForAPIServer returns nil when /readyz succeeds, or has been refused with 401 or 403 maxRefusals times
// in a row: an API server that is starting may lack its roles for some seconds, and one without the binding
// system:public-info-viewer refuses for good. It returns an error if ctx ends first or no client can be
// built.
func waitForAPIServer(ctx context.Context, config *rest.Config) error {
	config = rest.CopyConfig(config)
	config.Timeout = 5 * time.Second
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	logger := klog.FromContext(ctx)
	lastErr, refusals := "", 0
	err = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		err := client.RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
		if err != nil && ctx.Err() == nil {
			level := 0
			if err.Error() == lastErr {
				level = 2 // it is asked every second
			}
			logger.V(level).Info("Waiting for the API server", "server", config.Host, "err", err)
			lastErr = err.Error()
		}
		if apierrors.IsUnauthorized(err) || apierrors.IsForbidden(err) {
			refusals++
		} else {
			refusals = 0
		}
		return err == nil || refusals == maxRefusals, nil
	})
	if err == nil && lastErr != "" {
		logger.Info("The API server answers", "server", config.Host)
	}
	return err
}
