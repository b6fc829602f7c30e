// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/quartermaster-dev/quartermaster/hack/cluster"
	"github.com/quartermaster-dev/quartermaster/internal/assert"
	"github.com/quartermaster-dev/quartermaster/test/internal/fleet"
)

const (
	starts        = 3  // of a leader, for each median
	hostileValues = 10 // of each kind
	pushKey       = "quartermaster.dev/push-to"
	reloadKey     = "configmap.reloader.stakater.com/reload"
)

// All controllers, and what they need.
var (
	allComponents  = []string{"compat-reloader", "replication", "replication-compat", "ttl-chosen-types", "ttl-compat"}
	allControllers = []string{
		"--controllers=*,replication,ttl", "--compat=reloader,reflector,replicator,ttl-controller,janitor", "--replication-push-namespaces=*",
	}
)

// TestLongHostileValuesCostAStartLittle compares the CPU time of a leader's first 5 s, in a cluster of
// 2,000 namespaces, without and with ten objects that hold what is expensive in a grammar, and the time
// from its start until it has made another tenant's copy. The goal is 50 ms of CPU time for a value, and
// 100 ms for the copy; the bounds leave room for a busy machine.
func TestLongHostileValuesCostAStartLittle(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 15*time.Minute)
	binary, err := cluster.BuildProgram(ctx, "cmd/manager", false)
	assert.NoError(t, err)
	shared.InstallWith(ctx, t, allComponents...)
	manyNamespaces(ctx, t, 2000)
	c := costs{ctx: ctx, t: t, binary: binary, owner: shared.NewNamespace(ctx, t, nil), victim: shared.NewNamespace(ctx, t, nil)}
	c.createConfigMap(c.owner, "s", map[string]string{pushKey: c.victim})
	hostile := shared.NewNamespace(ctx, t, nil)
	for i := range 300 {
		c.createConfigMap(hostile, strings.Repeat("a", 200)+fmt.Sprint(i), nil)
	}
	costlyGlobs := repeatItem(64, strings.Repeat("*a", 31)+"b")
	baseCPU, baseCopy := c.measure("none")
	for name, annotations := range map[string]map[string]string{
		"replication: push-to of 200 KiB":                {pushKey: strings.Repeat("*", 200<<10) + "x"},
		"replication: push-to of the costliest globs":    {pushKey: costlyGlobs},
		"replication: replicate-to of 200 KiB":           {"replicator.v1.mittwald.de/replicate-to": strings.Repeat("(a?)*", 40<<10)},
		"replication: replicate-to of costly patterns":   {"replicator.v1.mittwald.de/replicate-to": repeatItem(60, "(a?){70}b")},
		"ttl: expires of 200 KiB":                        {"quartermaster.dev/expires": strings.Repeat("1h", 100<<10)},
		"config-reload: a list of 200 KiB":               {reloadKey: strings.Repeat("(a?)*", 40<<10)},
		"config-reload: a list of 200 KiB of names":      {reloadKey: repeatItem(20<<10, "a-name-xx")},
		"config-reload: a list of costly patterns":       {reloadKey: repeatItem(60, "(a?){70}b")},
		"config-reload: native, 200 KiB of globs":        {fleet.ReloadAnnotation: repeatItem(3000, "configmap/"+strings.Repeat("*a", 28)+"b")},
		"config-reload: native, fewer of the same globs": {fleet.ReloadAnnotation: repeatItem(60, "configmap/"+strings.Repeat("*a", 28)+"b")},
	} {
		if strings.HasPrefix(name, "config-reload") {
			c.createDeployments(hostile, hostileValues, annotations)
		} else {
			for i := range hostileValues {
				c.createConfigMap(hostile, fmt.Sprint("hostile-", i), annotations)
			}
		}
		cpu, copyDelay := c.measure(name)
		perValue := (cpu - baseCPU) / hostileValues
		t.Logf("%s: %v of CPU time for a value, a copy %v later", name, perValue.Round(100*time.Microsecond), (copyDelay - baseCopy).Round(time.Millisecond))
		if perValue > 500*time.Millisecond || copyDelay-baseCopy > 2*time.Second {
			t.Errorf("%s is expensive", name)
		}
		c.removeHostile(hostile)
	}
}

// TestLongCostlyPatternsKeepNobodyWaiting measures a copy of another tenant's, from the update of its
// source until a reader sees it, while the pattern lists of 100 Deployments and the patterns of 100
// sources change all the time in a namespace with 8,000 ConfigMaps. The goal is 100 ms; the bound
// leaves room for a busy machine.
func TestLongCostlyPatternsKeepNobodyWaiting(t *testing.T) {
	ctx := fleet.Within(t.Context(), t, 10*time.Minute)
	shared.InstallWith(ctx, t, allComponents...)
	c := costs{ctx: ctx, t: t, owner: shared.NewNamespace(ctx, t, nil), victim: shared.NewNamespace(ctx, t, nil)}
	c.createConfigMap(c.owner, "s", map[string]string{pushKey: c.victim})
	hostile := shared.NewNamespace(ctx, t, nil)
	parallel(8000, func(i int) { c.createConfigMap(hostile, strings.Repeat("a", 100)+fmt.Sprint(i), nil) })
	c.createDeployments(hostile, 100, nil)
	for i := range 100 {
		c.createConfigMap(hostile, fmt.Sprint("hostile-", i), nil)
	}
	shared.RunReleased(ctx, t, allControllers...)
	latency := shared.NewLatency(ctx, t)
	median := func(situation string) time.Duration {
		return latency.Median(situation, c.setSource, c.isCopied)
	}
	quiet := median("alone")
	writing, stop := context.WithCancel(ctx)
	var writers sync.WaitGroup
	for part := range 4 {
		writers.Go(func() {
			for i := part; writing.Err() == nil; i += 4 {
				name := fmt.Sprint("hostile-", i%100)
				patch := `{"metadata":{"annotations":{"` + reloadKey + `":"n` + fmt.Sprint(i) + strings.Repeat(",a.*a.*a.*b", 10) + `","` + pushKey + `":"n` + fmt.Sprint(i) + `*,*a*a*b"}}}`
				_, _ = shared.Admin.AppsV1().Deployments(hostile).Patch(writing, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
				_, _ = shared.Admin.CoreV1().ConfigMaps(hostile).Patch(writing, name, types.MergePatchType, []byte(patch), metav1.PatchOptions{})
			}
		})
	}
	took := median("while patterns change")
	stop()
	writers.Wait()
	if took > quiet+time.Second {
		t.Errorf("while patterns change, a copy takes %v, alone %v", took, quiet)
	}
}

// repeatItem returns an item n times, joined by commas.
func repeatItem(n int, item string) string {
	return strings.TrimSuffix(strings.Repeat(item+",", n), ",")
}

// manyNamespaces creates namespaces with names that are costly to match.
func manyNamespaces(ctx context.Context, t *testing.T, n int) {
	t.Helper()
	parallel(n, func(i int) {
		ns := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: strings.Repeat("a", 50) + fmt.Sprint(i)}}
		if _, err := shared.Admin.CoreV1().Namespaces().Create(ctx, ns, metav1.CreateOptions{}); err != nil {
			t.Error(err)
		}
	})
}

// parallel calls do for 0 to n-1, 10 at a time.
func parallel(n int, do func(i int)) {
	var running sync.WaitGroup
	for part := range 10 {
		running.Go(func() {
			for i := part; i < n; i += 10 {
				do(i)
			}
		})
	}
	running.Wait()
}

// costs measures what hostile objects cost others.
type costs struct {
	ctx           context.Context
	t             *testing.T
	binary        string
	owner, victim string // namespaces: s of the first is pushed to the other
	value         int    // of s
}

// measure returns the medians of the CPU time that leaders took, and of the time until they had made the
// copy.
func (c *costs) measure(situation string) (cpu, copyDelay time.Duration) {
	c.t.Helper()
	var cpus, copies []time.Duration
	for range starts {
		cpu, copyDelay := c.measureStart()
		cpus, copies = append(cpus, cpu), append(copies, copyDelay)
	}
	slices.Sort(cpus)
	slices.Sort(copies)
	c.t.Logf("%s: CPU time %v, copies after %v", situation, cpus, copies)
	return cpus[starts/2], copies[starts/2]
}

func (c *costs) measureStart() (cpu, copyDelay time.Duration) {
	c.t.Helper()
	c.value++
	want := fmt.Sprint(c.value)
	c.setSource(want)
	m, err := shared.StartManager(shared.NewReplica(c.ctx, c.t), cluster.ManagerOptions{Binary: c.binary, Args: allControllers})
	assert.NoError(c.t, err)
	defer shared.FreeLease(c.t, m)
	defer func() { _ = m.Stop(context.WithoutCancel(c.ctx), fleet.Patience) }() // it releases the Lease, so that the next one need not wait
	shared.WaitForLeader(c.ctx, c.t, m)
	begin := time.Now()
	for !c.isCopied(want) {
		if time.Since(begin) > fleet.Patience {
			c.t.Fatalf("no copy within %v", fleet.Patience)
		}
	}
	copyDelay = time.Since(begin)
	fleet.Wait(c.ctx, 5*time.Second)
	return cpuTime(c.t, m.PID()), copyDelay
}

// setSource changes the other tenant's source.
func (c *costs) setSource(value string) {
	c.t.Helper()
	patch := []byte(`{"data":{"k":"` + value + `"}}`)
	if _, err := shared.Admin.CoreV1().ConfigMaps(c.owner).Patch(c.ctx, "s", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// isCopied reports whether the copy has the value.
func (c *costs) isCopied(value string) bool {
	c.t.Helper()
	cm, err := shared.Admin.CoreV1().ConfigMaps(c.victim).Get(c.ctx, "s", metav1.GetOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		c.t.Fatal(err)
	}
	return err == nil && cm.Data["k"] == value
}

func (c *costs) createConfigMap(namespace, name string, annotations map[string]string) {
	c.t.Helper()
	cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: annotations}}
	if _, err := shared.Admin.CoreV1().ConfigMaps(namespace).Create(c.ctx, cm, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *costs) createDeployments(namespace string, n int, annotations map[string]string) {
	c.t.Helper()
	for i := range n {
		d := cluster.NewDeployment(fmt.Sprint("hostile-", i), "none", annotations)
		d.Spec.Replicas = ptr.To[int32](0)
		if _, err := shared.Admin.AppsV1().Deployments(namespace).Create(c.ctx, d, metav1.CreateOptions{}); err != nil {
			c.t.Fatal(err)
		}
	}
}

// removeHostile deletes the hostile objects of a namespace.
func (c *costs) removeHostile(namespace string) {
	c.t.Helper()
	for i := range hostileValues {
		name := fmt.Sprint("hostile-", i)
		for _, err := range []error{
			shared.Admin.CoreV1().ConfigMaps(namespace).Delete(c.ctx, name, metav1.DeleteOptions{}),
			shared.Admin.AppsV1().Deployments(namespace).Delete(c.ctx, name, metav1.DeleteOptions{}),
		} {
			if err != nil && !apierrors.IsNotFound(err) {
				c.t.Fatal(err)
			}
		}
	}
}

// cpuTime returns the CPU time of a process, user and system.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	assert.NoError(t, err)
	// The name, in parentheses, may contain blanks. After it, utime and stime are the fields 14 and 15 of
	// proc(5), in 1/100 s.
	_, rest, _ := strings.Cut(string(text), ") ")
	var sum int
	for _, field := range strings.Fields(rest)[11:13] {
		ticks, err := strconv.Atoi(field)
		assert.NoError(t, err)
		sum += ticks
	}
	return time.Duration(sum) * 10 * time.Millisecond
}
