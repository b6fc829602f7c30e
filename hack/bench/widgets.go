// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/dynamic"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
)

const (
	widgetCRD = "examples/widget/config/crd/example.com_widgets.yaml"
	// widgetSettings is a ConfigMap in each namespace that all Widgets there share.
	widgetSettings = "common"
	// widgetPatience limits the wait for all Widgets.
	widgetPatience = 10 * time.Minute
)

var widgetResource = schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}

// benchmarkWidgets measures the controller of examples/widget, and the same one on controller-runtime, from a
// start among Widgets that nobody has reconciled yet. Both have one worker and no limit of their own
// on requests, and both are ServiceAccounts of kube-system, to which priority and fairness gives the
// same priority.
func (b *bench) benchmarkWidgets(ctx context.Context) (err error) {
	subjects := []subject{
		managerSubject(b, b.binaries.widget, "--leader-elect-resource-name=quartermaster", "--kube-api-qps=-1"),
		{name: peer, start: (*bench).startPeer, binary: b.binaries.widgetPeer},
	}
	objects, err := dynamic.NewForConfig(b.cluster.AdminConfig())
	if err != nil {
		return err
	}
	w := &widgetRun{bench: b, objects: objects.Resource(widgetResource), n: b.opts.scaled(10000)}
	if err := w.install(ctx); err != nil {
		return err
	}
	defer func() {
		_, deleteErr := b.cluster.Kubectl(context.WithoutCancel(ctx), "delete", "--timeout=60s", "-f", filepath.Join(b.root, widgetCRD))
		err = errors.Join(err, deleteErr)
	}()
	// There and back, so that neither gains by the order if the machine becomes faster or slower.
	for _, s := range []subject{subjects[0], subjects[1], subjects[1], subjects[0]} {
		if !b.opts.wants(s.name) {
			continue
		}
		if err := w.createWidgets(ctx); err != nil {
			return err
		}
		if err := w.measure(ctx, s); err != nil {
			return fmt.Errorf("%s: %w", s.name, err)
		}
		if err := w.deleteWidgets(ctx); err != nil {
			return err
		}
	}
	for _, s := range subjects {
		for _, r := range w.collected {
			if r.subject == s.name {
				b.addRow(fmt.Sprintf("widgets/%d Widgets, %s", w.n, r.name), r.subject, r.unit, r.values...)
			}
		}
	}
	return nil
}

// widgetRun is the part of that name.
type widgetRun struct {
	*bench
	objects   dynamic.NamespaceableResourceInterface // Widgets
	n         int
	collected []widgetRow
}

type widgetRow struct {
	name, subject, unit string
	values              []float64
}

// addValues adds values to a row.
func (w *widgetRun) addValues(name, subject, unit string, values ...float64) {
	for i := range w.collected {
		if r := &w.collected[i]; r.name == name && r.subject == subject {
			r.values = append(r.values, values...)
			return
		}
	}
	w.collected = append(w.collected, widgetRow{name, subject, unit, values})
}

// install applies the CustomResourceDefinition and the roles that our build prints, for the
// ServiceAccount that all our managers have here.
func (w *widgetRun) install(ctx context.Context) error {
	crd := filepath.Join(w.root, widgetCRD)
	if err := w.cluster.ApplyDir(ctx, crd); err != nil {
		return err
	}
	if err := w.cluster.WaitForCRDs(ctx, crd); err != nil {
		return err
	}
	roles, err := exec.CommandContext(ctx, w.binaries.widget, "rbac", "--leader-elect-resource-name=quartermaster").Output()
	if err != nil {
		return fmt.Errorf("the roles of %s: %w", w.binaries.widget, err)
	}
	text := strings.ReplaceAll(string(roles), "  name: widget\n  namespace: kube-system", "  name: quartermaster\n  namespace: kube-system")
	file := filepath.Join(w.box.Dir, "widget-rbac.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		return err
	}
	if err := w.cluster.ApplyDir(ctx, file); err != nil {
		return err
	}
	for i := range dataNamespaces {
		if err := w.createNamespace(ctx, dataNamespace(i)); err != nil {
			return err
		}
	}
	return w.deleteObjects(ctx)
}

// createWidgets creates the Widgets and their settings.
func (w *widgetRun) createWidgets(ctx context.Context) error {
	begin := time.Now()
	settings := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: widgetSettings}, Data: map[string]string{"COLOR": "red"}}
	for i := range dataNamespaces {
		if _, err := w.admin.CoreV1().ConfigMaps(dataNamespace(i)).Create(ctx, settings, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	err := parallel(ctx, 32, w.n, func(ctx context.Context, i int) error {
		widget := &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": widgetResource.GroupVersion().String(), "kind": "Widget",
			"metadata": map[string]any{"name": dataName("widget", i)},
			"spec":     map[string]any{"image": "nginx", "replicas": int64(2), "message": "hello", "settings": widgetSettings},
		}}
		_, err := w.objects.Namespace(dataNamespace(i)).Create(ctx, widget, metav1.CreateOptions{})
		return err
	})
	w.logProgress("Created %d Widgets in %s", w.n, time.Since(begin).Round(time.Second))
	return err
}

// measure runs a subject until it has reconciled all Widgets, and then until its memory is steady.
func (w *widgetRun) measure(ctx context.Context, s subject) (err error) {
	list, err := w.objects.List(ctx, metav1.ListOptions{Limit: 1})
	if err != nil {
		return err
	}
	events, err := w.objects.Watch(ctx, metav1.ListOptions{ResourceVersion: list.GetResourceVersion()})
	if err != nil {
		return err
	}
	defer events.Stop()
	audit, err := w.tailAudit()
	if err != nil {
		return err
	}
	p, err := w.run(ctx, s, "widget")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.Stop(context.WithoutCancel(ctx), stopGrace)) }()
	if err := w.awaitConditions(ctx, events, p); err != nil {
		return err
	}
	took := time.Since(p.started)
	cpu, err := cpuSeconds(p.PID())
	if err != nil {
		return err
	}
	w.logProgress("%s: all reconciled after %s, waiting for %s", s.name, took.Round(time.Millisecond), w.opts.settle)
	if err := cluster.Sleep(ctx, w.opts.settle); err != nil {
		return err
	}
	w.addValues("start to all reconciled", s.name, "s", took.Seconds())
	w.addValues("CPU time until then", s.name, "s", cpu)
	if err := w.collectMemory(ctx, s.name, p); err != nil {
		return err
	}
	if err := w.collectRequests(audit, s.name, p); err != nil {
		return err
	}
	return w.checkOwned(ctx)
}

// awaitConditions returns when each Widget has a condition, which is the last that the controllers write.
func (w *widgetRun) awaitConditions(ctx context.Context, events watch.Interface, p *process) error {
	timeout := time.After(widgetPatience)
	reconciled := map[types.UID]bool{}
	for len(reconciled) < w.n {
		select {
		case e, ok := <-events.ResultChan():
			widget, isWidget := e.Object.(*unstructured.Unstructured)
			if !ok || !isWidget {
				return errors.New("the watch of Widgets ended")
			}
			conditions, _, _ := unstructured.NestedSlice(widget.Object, "status", "conditions")
			if len(conditions) > 0 {
				reconciled[widget.GetUID()] = true
			}
		case <-timeout:
			return fmt.Errorf("%d of %d Widgets were reconciled after %s; its last lines:\n%s",
				len(reconciled), w.n, widgetPatience, p.Tail(15))
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

func (w *widgetRun) collectMemory(ctx context.Context, name string, p *process) error {
	var steady []float64
	var peak float64
	for range samples {
		r, err := readResidence(p.PID())
		if err != nil {
			return err
		}
		steady, peak = append(steady, r.current), r.peak
		if err := cluster.Sleep(ctx, sampleInterval); err != nil {
			return err
		}
	}
	w.addValues("RSS steady", name, "MiB", steady...)
	w.addValues("RSS peak since the start", name, "MiB", peak)
	return nil
}

// collectRequests counts what the process has requested since its start, apart from watches and from
// requests for its Lease.
func (w *widgetRun) collectRequests(audit *auditTail, name string, p *process) error {
	events, err := audit.read()
	if err != nil {
		return err
	}
	all, refused := 0, 0
	for _, e := range events {
		if !p.madeRequest(e) || !isRequest(e) || isLeaseRequest(e) {
			continue
		}
		all++
		if e.ResponseStatus.Code >= 400 {
			refused++
		}
	}
	w.addValues("API requests per Widget", name, "requests", float64(all)/float64(w.n))
	w.addValues("refused requests", name, "requests", float64(refused))
	return nil
}

// checkOwned returns an error unless each Widget has its two objects.
func (w *widgetRun) checkOwned(ctx context.Context) error {
	deployments, err := w.admin.AppsV1().Deployments("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	configMaps, err := w.admin.CoreV1().ConfigMaps("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	owned := map[string]int{}
	for i := range deployments.Items {
		if metav1.GetControllerOf(&deployments.Items[i]) != nil {
			owned["Deployments"]++
		}
	}
	for i := range configMaps.Items {
		if metav1.GetControllerOf(&configMaps.Items[i]) != nil {
			owned["ConfigMaps"]++
		}
	}
	if owned["Deployments"] != w.n || owned["ConfigMaps"] != w.n {
		return fmt.Errorf("%d Widgets own %v", w.n, owned)
	}
	return nil
}

// deleteWidgets deletes all Widgets, without their finalizers, and what they own.
func (w *widgetRun) deleteWidgets(ctx context.Context) error {
	begin := time.Now()
	err := parallel(ctx, 32, w.n, func(ctx context.Context, i int) error {
		_, err := w.objects.Namespace(dataNamespace(i)).Patch(ctx, dataName("widget", i), types.MergePatchType,
			[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{})
		return err
	})
	if err != nil {
		return err
	}
	err = parallel(ctx, 8, dataNamespaces, func(ctx context.Context, i int) error {
		return w.objects.Namespace(dataNamespace(i)).DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
	})
	w.logProgress("Deleted the Widgets in %s", time.Since(begin).Round(time.Second))
	return errors.Join(err, w.deleteObjects(ctx))
}
