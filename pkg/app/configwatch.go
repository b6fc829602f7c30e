// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/component-base/configz"
	"k8s.io/component-base/logs"
	"k8s.io/component-base/metrics"
	"k8s.io/klog/v2"
)

// configPollInterval is how often --config is read again. Reading also sees what notifications of a file system miss:
// the switched symbolic link of a mounted ConfigMap, and network file systems.
const configPollInterval = 2 * time.Second

// configWatch follows --config while the manager runs. What can change at once does; the rest waits for a restart.
type configWatch struct {
	options *Options
	// running is the configuration in effect, the one that /configz shows.
	running *ManagerConfiguration
	configz *configz.Config
	// live are the settings that take effect at once, by GROUP.FIELD.
	live map[string]func(ctx context.Context, next *Options) error

	handled, seen fileState
	restart       sets.Set[string] // settings that were last reported to need one

	restartRequired, lastReloadSuccessful *metrics.Gauge
}

// fileState is what reading the file has given.
type fileState struct {
	text []byte
	err  string
}

func (s fileState) equal(other fileState) bool {
	return s.err == other.err && bytes.Equal(s.text, other.text)
}

// errRestart is the answer of a live setting that cannot take this value while the manager runs.
var errRestart = errors.New("needs a restart")

func newConfigWatch(o *Options, config *configz.Config, controllers hostedControllers, registry metrics.KubeRegistry) (*configWatch, error) {
	w := &configWatch{
		options: o,
		running: newManagerConfiguration(o.flags),
		configz: config,
		handled: fileState{text: o.File.text},
		restartRequired: metrics.NewGauge(&metrics.GaugeOpts{
			Namespace:      "quartermaster",
			Name:           "config_restart_required",
			Help:           "1 when the configuration file has settings that take effect at the next start only, else 0.",
			StabilityLevel: metrics.ALPHA,
		}),
		lastReloadSuccessful: metrics.NewGauge(&metrics.GaugeOpts{
			Namespace:      "quartermaster",
			Name:           "config_last_reload_successful",
			Help:           "0 when the configuration file as it is now was refused and the configuration before it goes on, else 1.",
			StabilityLevel: metrics.ALPHA,
		}),
	}
	w.live = map[string]func(context.Context, *Options) error{
		"generic.controllers": func(_ context.Context, next *Options) error {
			enabled, err := next.enabled()
			if err != nil {
				return err
			}
			return controllers.enable(enabled)
		},
		"logs.v": func(_ context.Context, next *Options) error {
			_, err := logs.GlogSetter(fmt.Sprint(uint32(next.Logs.Verbosity)))
			return err
		},
		"logs.vmodule": func(_ context.Context, next *Options) error {
			var klogFlags flag.FlagSet
			klog.InitFlags(&klogFlags)
			return klogFlags.Set("vmodule", next.flags.FlagSets["logs"].Lookup("vmodule").Value.String())
		},
	}
	w.seen = w.handled
	for _, gauge := range []*metrics.Gauge{w.restartRequired, w.lastReloadSuccessful} {
		if err := registry.Register(gauge); err != nil {
			return nil, err
		}
	}
	w.lastReloadSuccessful.Set(1)
	return w, config.Set(w.running)
}

// run follows the file until ctx ends; without --config there is none.
func (w *configWatch) run(ctx context.Context) {
	if w.options.File.Path == "" {
		return
	}
	w.options.File.logOverridden(ctx)
	for sleep(ctx, configPollInterval) {
		w.poll(ctx)
	}
}

// poll reads the file and acts when it is new and was the same at the poll before: one that is being written is not
// taken at its word.
func (w *configWatch) poll(ctx context.Context) {
	var now fileState
	text, err := os.ReadFile(w.options.File.Path)
	if err != nil {
		now.err = err.Error()
	} else {
		now.text = text
	}
	settled := now.equal(w.seen)
	w.seen = now
	if !settled || now.equal(w.handled) {
		return
	}
	w.handled = now
	if err == nil {
		err = w.reload(ctx, text)
	}
	if err != nil {
		w.lastReloadSuccessful.Set(0)
		klog.FromContext(ctx).Error(err, "Refused the configuration file; the configuration before it goes on", "file", w.options.File.Path)
		return
	}
	w.lastReloadSuccessful.Set(1)
}

// reload applies what can be applied of a new text and reports the rest. After an error nothing has changed, unless the
// error is that of a live setting.
func (w *configWatch) reload(ctx context.Context, text []byte) error {
	next, err := w.options.withConfigFile(text)
	if err != nil {
		return err
	}
	next.File.logOverridden(ctx)
	logger := klog.FromContext(ctx).WithValues("file", w.options.File.Path)
	running, restart := w.running.copy(), sets.New[string]()
	var errs []error
	for _, c := range running.changes(newManagerConfiguration(next.flags)) {
		err := errRestart
		if apply, ok := w.live[c.name]; ok {
			err = apply(ctx, next)
		}
		switch {
		case err == nil:
			logger.Info("Changed a setting", "setting", c.name, "from", c.old, "to", c.new)
			c.at.Value = c.new
		case errors.Is(err, errRestart):
			logger.Info("A setting of the configuration file takes effect at the next start only", "setting", c.name, "running", c.old, "file", c.new, "reason", err.Error())
			restart.Insert(c.name)
		default:
			errs = append(errs, fmt.Errorf("%s: %w", c.name, err))
		}
	}
	if len(restart) == 0 && len(w.restart) > 0 {
		logger.Info("No setting of the configuration file needs a restart any more")
	}
	w.running, w.restart = running, restart
	w.restartRequired.Set(float64(min(len(restart), 1)))
	return errors.Join(append(errs, w.configz.Set(running))...)
}
