// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package app

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/component-base/configz"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/testutil"
	"k8s.io/klog/v2"
	"k8s.io/klog/v2/textlogger"
)

// watched is a configWatch whose log and metrics can be read.
type watched struct {
	*configWatch
	path        string
	log         *bytes.Buffer
	ctx         context.Context
	registry    metrics.KubeRegistry
	controllers hostedControllers
}

// newWatched starts from a file with the lines and from the arguments.
func newWatched(t *testing.T, lines []string, args ...string) *watched {
	t.Helper()
	entry := withFunctions(Entry{Name: "extra", Config: &extraConfig{Size: 1}})
	o, err := NewOptions(entry)
	if err != nil {
		t.Fatal(err)
	}
	w := &watched{path: writeConfig(t, lines...), log: &bytes.Buffer{}, registry: metrics.NewKubeRegistry()}
	flags := pflag.NewFlagSet("manager", pflag.ContinueOnError)
	for _, fs := range o.flags.FlagSets {
		flags.AddFlagSet(fs)
	}
	if err := flags.Parse(append(args, "--config="+w.path)); err != nil {
		t.Fatal(err)
	}
	if err := o.readConfigFile(); err != nil {
		t.Fatal(err)
	}
	for _, e := range o.entries[:1] { // extra is not enabled at the start
		w.controllers = append(w.controllers, &hosted{name: e.Name})
	}
	config, err := configz.New(t.Name())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { configz.Delete(t.Name()) })
	if w.configWatch, err = newConfigWatch(o, config, w.controllers, w.registry); err != nil {
		t.Fatal(err)
	}
	w.ctx = klog.NewContext(t.Context(), textlogger.NewLogger(textlogger.NewConfig(textlogger.Output(w.log))))
	return w
}

// extraConfig is that of a controller of somebody's own.
type extraConfig struct{ Size int }

func (c *extraConfig) AddFlags(fs *pflag.FlagSet) { fs.IntVar(&c.Size, "extra-size", c.Size, "") }
func (c *extraConfig) Validate() error            { return nil }

// settle lets the watch see the file as it is now, as often as it needs to believe it.
func (w *watched) settle() string {
	w.log.Reset()
	w.poll(w.ctx)
	w.poll(w.ctx)
	return w.log.String()
}

// shown is the value of a setting in the running configuration.
func (w *watched) shown(t *testing.T, group, field string) any {
	t.Helper()
	text, err := json.Marshal(w.configz)
	if err != nil {
		t.Fatal(err)
	}
	var groups map[string]any
	if err := json.Unmarshal(text, &groups); err != nil {
		t.Fatal(err)
	}
	return groups[group].(map[string]any)[field]
}

// gauges compares the two metrics.
func (w *watched) gauges(t *testing.T, restartRequired, lastReloadSuccessful float64) {
	t.Helper()
	for gauge, want := range map[*metrics.Gauge]float64{w.restartRequired: restartRequired, w.lastReloadSuccessful: lastReloadSuccessful} {
		if got, err := testutil.GetGaugeMetricValue(gauge); err != nil || got != want {
			t.Errorf("%s is %v, want %v (%v)", gauge.FQName(), got, want, err)
		}
	}
}

func contains(t *testing.T, log string, wants ...string) {
	t.Helper()
	for _, want := range wants {
		if !strings.Contains(log, want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
}

// keepVerbosity puts klog's level, which is the process's, back at the end of the test.
func keepVerbosity(t *testing.T) {
	t.Helper()
	t.Cleanup(func() {
		var zero klog.Level
		if err := zero.Set("0"); err != nil {
			t.Error(err)
		}
	})
}

func TestLogLevelFollowsTheFile(t *testing.T) {
	keepVerbosity(t)
	w := newWatched(t, []string{"logs: {v: 1}"})
	if log := w.settle(); log != "" {
		t.Errorf("nothing has changed, and it logged:\n%s", log)
	}
	rewriteConfig(t, w.path, "logs: {v: 5}")
	contains(t, w.settle(), `"Changed a setting"`, `setting="logs.v"`, "from=1", "to=5")
	if !klog.V(5).Enabled() || klog.V(6).Enabled() {
		t.Error("the log level is not 5")
	}
	if got := w.shown(t, "logs", "v"); got != 5.0 {
		t.Errorf("/configz shows level %v", got)
	}
	w.gauges(t, 0, 1)
	if log := w.settle(); log != "" {
		t.Errorf("an unchanged file was read again:\n%s", log)
	}
	t.Run("and back to the default when the line goes", func(t *testing.T) {
		rewriteConfig(t, w.path)
		w.settle()
		if klog.V(1).Enabled() {
			t.Error("the log level is not 0")
		}
	})
}

func TestLogLevelOfTheCommandLineStays(t *testing.T) {
	keepVerbosity(t)
	w := newWatched(t, nil, "--v=0")
	rewriteConfig(t, w.path, "logs: {v: 5, vmodule: \"nofile=3\"}")
	contains(t, w.settle(), `setting="logs.vmodule"`, `"The command line wins over a setting of the configuration file"`, `setting="logs.v" flag="--v" running=0 ignored=5`)
	if klog.V(1).Enabled() || w.shown(t, "logs", "v") != 0.0 || w.shown(t, "logs", "vmodule") != "nofile=3" {
		t.Error("the file won over --v, or vmodule did not follow it")
	}
}

func TestWhatNeedsARestartIsReportedAndNotDone(t *testing.T) {
	w := newWatched(t, []string{"extraController: {extraSize: 2}"})
	own := w.options.entries[len(w.options.entries)-1].Config.(*extraConfig)
	rewriteConfig(t, w.path, "extraController: {extraSize: 3}", "generic: {shutdownTimeout: 30s}")
	contains(t, w.settle(), "takes effect at the next start only", `setting="generic.shutdownTimeout"`, `running="20s"`, `file="30s"`, `setting="extraController.extraSize"`)
	w.gauges(t, 1, 1)
	if w.options.Generic.ShutdownTimeout != 20*time.Second || own.Size != 2 || w.shown(t, "generic", "shutdownTimeout") != "20s" {
		t.Errorf("it took effect: %v, size %d, /configz shows %v", w.options.Generic.ShutdownTimeout, own.Size, w.shown(t, "generic", "shutdownTimeout"))
	}
	rewriteConfig(t, w.path)
	contains(t, w.settle(), `setting="extraController.extraSize" running=2 file=1`)
	rewriteConfig(t, w.path, "extraController: {extraSize: 2}")
	contains(t, w.settle(), "No setting of the configuration file needs a restart any more")
	w.gauges(t, 0, 1)
}

func TestABrokenFileIsReportedOnceAndChangesNothing(t *testing.T) {
	keepVerbosity(t)
	for name, tc := range map[string]struct {
		lines []string
		want  string
	}{
		"one that does not parse":           {[]string{"logs: {v: 5"}, "is not YAML"},
		"one with a field that is unknown":  {[]string{"logs: {v: 5, w: 1}"}, ":3: logs.w: is not known"},
		"one with a value that is refused":  {[]string{"logs: {v: 5}", "generic: {shutdownTimeout: 0s}"}, "--shutdown-timeout: 0s must be greater than 0"},
		"one with a controller that is not": {[]string{"logs: {v: 5}", "generic: {controllers: [nothing]}"}, "nothing\\\" is not a known controller"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWatched(t, []string{"logs: {v: 0}"})
			rewriteConfig(t, w.path, tc.lines...)
			contains(t, w.settle(), `"Refused the configuration file; the configuration before it goes on"`, tc.want)
			w.gauges(t, 0, 0)
			if klog.V(1).Enabled() || w.shown(t, "logs", "v") != 0.0 {
				t.Error("it took effect")
			}
			if log := w.settle(); log != "" {
				t.Errorf("reported again:\n%s", log)
			}
			rewriteConfig(t, w.path, "logs: {v: 0}")
			w.settle()
			w.gauges(t, 0, 1)
		})
	}
	t.Run("one that is gone", func(t *testing.T) {
		w := newWatched(t, nil)
		if err := os.Remove(w.path); err != nil {
			t.Fatal(err)
		}
		contains(t, w.settle(), "Refused the configuration file", "no such file")
		w.gauges(t, 0, 0)
	})
	t.Run("one that is still being written", func(t *testing.T) {
		w := newWatched(t, nil)
		rewriteConfig(t, w.path, "logs: {v")
		w.poll(w.ctx)
		if w.log.Len() > 0 {
			t.Errorf("it was judged at first sight:\n%s", w.log)
		}
		rewriteConfig(t, w.path, "logs: {v: 0}")
		if log := w.settle(); log != "" {
			t.Errorf("it was judged:\n%s", log)
		}
	})
}

func TestAMountedConfigMapIsFollowed(t *testing.T) {
	keepVerbosity(t)
	w := newWatched(t, nil)
	// As the kubelet does it: FILE -> ..data/FILE, ..data -> ..VERSION, and an update renames a new link onto ..data.
	dir := filepath.Dir(w.path)
	publish := func(version string, lines ...string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, version), 0o700); err != nil {
			t.Fatal(err)
		}
		rewriteConfig(t, filepath.Join(dir, version, "config.yaml"), lines...)
		if err := os.Symlink(version, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	publish("..1")
	if err := os.Remove(w.path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join("..data", "config.yaml"), w.path); err != nil {
		t.Fatal(err)
	}
	if log := w.settle(); log != "" {
		t.Errorf("the same content, and it logged:\n%s", log)
	}
	publish("..2", "logs: {v: 3}")
	contains(t, w.settle(), `setting="logs.v"`)
}

func TestTheFileIsPolledUntilTheContextEnds(t *testing.T) {
	keepVerbosity(t)
	w := newWatched(t, nil)
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(klog.NewContext(t.Context(), klog.FromContext(w.ctx)))
		done := make(chan struct{})
		go func() { defer close(done); w.run(ctx) }()
		rewriteConfig(t, w.path, "logs: {v: 3}")
		<-time.After(2*configPollInterval + time.Millisecond)
		synctest.Wait()
		if !klog.V(3).Enabled() {
			t.Error("two polls have not seen the change")
		}
		cancel()
		<-done
	})
}
