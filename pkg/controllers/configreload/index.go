// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload

import (
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// Indexes of the workloads.
const (
	// sourceIndex finds workloads by a source that they reference or name. The value patternValue finds
	// workloads that name sources by a pattern, which any source may match. Workloads that do not opt in are
	// left out.
	sourceIndex  = "source"
	patternValue = "*"
	// cronJobIndex finds Jobs by the UID of the CronJob that controls them.
	cronJobIndex = "cronjob"
	// classIndex finds the statuses of pods by their SecretProviderClass.
	classIndex = "class"
)

// cachedSource is what the controller reads of a cached ConfigMap, Secret or status of a pod.
type cachedSource interface {
	metav1.Object // with at least the annotations of sourceAnnotations
	// Digest returns the result of sourceDigest for the controller's Name; nil if the object does
	// not count.
	Digest(controllerName string) []byte
	policy.History
}

func (c *controller) addIndexes() {
	for _, k := range c.kinds {
		k.informer.AddIndex(sourceIndex, func(obj metav1.Object) []string { return c.indexBySource(k, obj) })
	}
	if c.kinds["CronJob"] != nil {
		c.informers.Jobs.AddIndex(cronJobIndex, indexByCronJob)
	}
	for typ, informer := range c.sources {
		if typ == policy.SecretProviderClass {
			informer.AddIndex(classIndex, indexByClass)
		}
	}
}

func sourceIndexValue(namespace string, key policy.SourceKey) string {
	return namespace + "/" + key.Type.String() + "/" + key.Name
}

// indexBySource leaves out an object that cannot be read; its reconcile reports it.
func (c *controller) indexBySource(k *kind, obj metav1.Object) []string {
	workload, err := policy.NewWorkload(&k.Kind, obj, Name)
	if err != nil {
		return nil
	}
	selection := c.keys.Outline(workload)
	if selection.Empty() {
		return nil
	}
	if slices.ContainsFunc(policy.SourceTypes, selection.NamesByPattern) {
		return []string{workload.Namespace + "/" + patternValue}
	}
	var values []string
	for _, key := range workload.References() {
		if selection.TakesReferenced(key.Type) {
			values = append(values, sourceIndexValue(workload.Namespace, key))
		}
	}
	for key := range selection.Names {
		values = append(values, sourceIndexValue(workload.Namespace, key))
	}
	if len(values) > maxIndexed {
		return []string{workload.Namespace + "/" + patternValue}
	}
	slices.Sort(values)
	return slices.Compact(values)
}

// maxIndexed is for how many sources a workload is indexed one by one. A workload with more is reconciled
// for each source of its namespace.
const maxIndexed = 300

// jobKind is the kind of the CronJobs' Jobs, which may not be rolled themselves.
var jobKind = policy.Kind{Name: "Job"}

func indexByCronJob(obj metav1.Object) []string {
	workload, err := policy.NewWorkload(&jobKind, obj, Name)
	if err != nil || workload.CronJob == "" {
		return nil
	}
	return []string{string(workload.CronJob)}
}

func indexByClass(s cachedSource) []string {
	if sourceName(policy.SecretProviderClass, s) == "" {
		return nil
	}
	return []string{s.GetNamespace() + "/" + sourceName(policy.SecretProviderClass, s)}
}

// sourceName returns the name by which workloads know a source: for the status of a pod, its class.
func sourceName(typ policy.SourceType, obj cachedSource) string {
	if typ != policy.SecretProviderClass {
		return obj.GetName()
	}
	_, class := policy.ParseDigest(obj.Digest(Name))
	return class
}

// digestOf returns nil for a source that does not exist or does not count.
func digestOf(obj cachedSource) []byte {
	if obj == nil {
		return nil
	}
	return obj.Digest(Name)
}

// readSource reads a cached source.
func (c *controller) readSource(obj cachedSource) policy.Source {
	if obj == nil {
		return policy.Source{}
	}
	s := policy.Source{Version: obj.GetResourceVersion()}
	digest := digestOf(obj)
	if digest == nil {
		return s
	}
	s.Hash, _ = policy.ParseDigest(digest)
	s.ChangedVersion = obj.ChangedVersion()
	s.Ignored, s.Matched = c.keys.Flags(obj.GetAnnotations())
	return s
}

// maxScan limits the steps that it takes to match the names of a namespace's sources against the
// patterns of one workload: about 0.05 s. Ten patterns such as app-.* and 3,000 names take half as many.
const maxScan = 2 << 20

// lookUpSources returns the cached sources that may concern the workload, and the keys of these sources and
// of absent sources that would concern it. If its patterns take too long, the problem is returned alone.
func (c *controller) lookUpSources(
	workload *policy.Workload, selection *policy.Selection, recorded policy.State,
) (sources map[policy.SourceKey]policy.Source, watched map[policy.SourceKey]bool, problem *policy.Problem) {
	sources, watched = map[policy.SourceKey]policy.Source{}, map[policy.SourceKey]bool{}
	addSource := func(key policy.SourceKey) {
		watched[key] = true
		if obj := c.cachedSource(workload.Namespace, key); obj != nil {
			sources[key] = c.readSource(obj)
		}
	}
	for _, key := range workload.References() {
		addSource(key)
	}
	for key := range recorded {
		addSource(key)
	}
	for key := range selection.Names {
		addSource(key)
	}
	steps := 0
	for typ, informer := range c.sources {
		if !selection.NamesByPattern(typ) {
			continue
		}
		for _, obj := range informer.List(workload.Namespace, nil) {
			key := policy.SourceKey{Type: typ, Name: sourceName(typ, obj)}
			if steps += selection.Steps(key); steps > maxScan {
				return nil, nil, c.keys.ScanProblem(selection, typ)
			}
			if selection.MatchName(key) == policy.Named {
				addSource(key)
			}
		}
	}
	return sources, watched, nil
}

// cachedSource returns a source; nil if there is none. For a class it returns the status of the pod whose
// mounts changed last or, if none changed, of the newest pod.
func (c *controller) cachedSource(namespace string, key policy.SourceKey) cachedSource {
	informer := c.sources[key.Type]
	if informer == nil {
		return nil
	}
	if key.Type != policy.SecretProviderClass {
		obj, _ := informer.Get(cache.NewObjectName(namespace, key.Name)) // nil if there is none
		return obj
	}
	var latest cachedSource
	for _, s := range informer.ByIndex(classIndex, namespace+"/"+key.Name) {
		if latest == nil || policy.Newer(s.ChangedVersion(), latest.ChangedVersion()) || s.ChangedVersion() != "" && latest.ChangedVersion() == "" ||
			latest.ChangedVersion() == "" && policy.Newer(s.FirstVersion(), latest.FirstVersion()) {
			latest = s
		}
	}
	return latest
}
