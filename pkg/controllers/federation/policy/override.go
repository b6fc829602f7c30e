// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Operation is one step of a JSON patch. The version of the overrides depends on the order of its fields.
type Operation struct {
	Op    string `json:"op,omitempty"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

type clusterOverrides struct {
	ClusterName      string      `json:"clusterName"`
	ClusterOverrides []Operation `json:"clusterOverrides,omitempty"`
}

const (
	opAdd     = "add"
	opRemove  = "remove"
	opReplace = "replace"
	// maxOperations is what API servers allow in a JSON patch. More of them could insert into a long
	// list again and again, which takes a core for seconds.
	maxOperations = 10_000
	// maxObject is the largest object that etcd takes by default, in bytes: 1.5 MiB.
	maxObject = 3 << 19
)

// Operations returns the overrides of a cluster.
func (f *Federated) Operations(cluster string) ([]Operation, error) {
	if f.malformed != nil {
		return nil, fmt.Errorf("overrides: %w", f.malformed)
	}
	var operations []Operation
	for i, o := range f.overrides {
		if o.ClusterName != cluster {
			continue
		}
		if slices.ContainsFunc(f.overrides[:i], func(earlier clusterOverrides) bool { return earlier.ClusterName == cluster }) {
			return nil, errors.New("overrides name the cluster twice")
		}
		operations = o.ClusterOverrides
	}
	if len(operations) > maxOperations {
		return nil, fmt.Errorf("over %d overrides", maxOperations)
	}
	paths := make(map[string]bool, len(operations))
	for _, o := range operations {
		if !slices.Contains([]string{"", opAdd, opRemove, opReplace}, o.Op) {
			return nil, fmt.Errorf("op: must be add, remove or replace, got %q", truncate(o.Op, 64))
		}
		_, path, _ := strings.Cut(o.Path, "/")
		if paths[path] {
			return nil, fmt.Errorf("the path %q is overridden twice", truncate(o.Path, maxError))
		}
		paths[path] = true
	}
	return operations, nil
}

var unescape = strings.NewReplacer("~1", "/", "~0", "~")

// pointer returns the keys of the path. Like json-patch, it ignores what is before the first slash.
func (o Operation) pointer() ([]string, error) {
	if o.Path == "" {
		return nil, nil
	}
	_, path, found := strings.Cut(o.Path, "/")
	if !found {
		return nil, errors.New("must begin with a slash")
	}
	keys := strings.Split(path, "/")
	for i := range keys {
		keys[i] = unescape.Replace(keys[i])
	}
	return keys, nil
}

// overlaps reports whether the path is one of the given keys, a part of it or above it.
func overlaps(path []string, keys ...string) bool {
	n := min(len(path), len(keys))
	return slices.Equal(path[:n], keys[:n])
}

func (o Operation) touchesAnnotations() bool {
	path, err := o.pointer()
	return err == nil && overlaps(path, "metadata", "annotations")
}

var errMissing = errors.New("the object has no such path")

// apply returns the document with the operation done, as json-patch v4 does it, but for one case: all
// annotations are added to those that are there. The document may be changed even if it fails.
func (o Operation) apply(document any, path []string) (any, error) {
	if len(path) == 0 {
		if _, isObject := o.Value.(map[string]any); !isObject || cmp.Or(o.Op, opReplace) != opReplace {
			return nil, errors.New("the whole object can only be replaced, by an object")
		}
		return runtime.DeepCopyJSONValue(o.Value), nil
	}
	if annotations, isObject := o.Value.(map[string]any); isObject && o.Op != opRemove && slices.Equal(path, []string{"metadata", "annotations"}) {
		fields, _ := document.(map[string]any)
		metadata, _ := fields["metadata"].(map[string]any)
		if existing, has := metadata["annotations"].(map[string]any); has {
			maps.Copy(existing, deepCopy(annotations))
			return document, nil
		}
	}
	return o.applyAt(document, path)
}

// applyAt does the operation below a node, and returns what the node has become.
func (o Operation) applyAt(node any, path []string) (any, error) {
	key, rest := path[0], path[1:]
	switch node := node.(type) {
	case map[string]any:
		child, has := node[key]
		switch {
		case len(rest) > 0:
			child, err := o.applyAt(child, rest)
			if err != nil {
				return nil, err
			}
			node[key] = child
		case o.Op != opRemove:
			node[key] = runtime.DeepCopyJSONValue(o.Value)
		case !has:
			return nil, errMissing
		default:
			delete(node, key)
		}
		return node, nil
	case []any:
		adds := len(rest) == 0 && o.Op == opAdd
		i, err := listIndex(key, len(node), adds)
		switch {
		case err != nil:
			return nil, err
		case len(rest) > 0:
			node[i], err = o.applyAt(node[i], rest)
			return node, err
		case adds:
			return slices.Insert(node, i, runtime.DeepCopyJSONValue(o.Value)), nil
		case o.Op == opRemove:
			return slices.Delete(node, i, i+1), nil
		}
		node[i] = runtime.DeepCopyJSONValue(o.Value)
		return node, nil
	}
	return nil, errMissing
}

// listIndex returns the index that a key means in a list of n items. If adds is set, there is one more index,
// which "-" means too.
func listIndex(key string, n int, adds bool) (int, error) {
	if adds {
		if n++; key == "-" {
			return n - 1, nil
		}
	}
	i, err := strconv.Atoi(key)
	if err != nil || i >= n || i < -n {
		return 0, fmt.Errorf("%q must be an index of a list with %d items", truncate(key, 64), n)
	}
	if i < 0 {
		i += n
	}
	return i, nil
}

// applyOverrides applies the operations to an object, which it may change, and refuses a result that is
// another object.
func applyOverrides(object map[string]any, operations []Operation) (map[string]any, error) {
	if len(operations) == 0 {
		return object, nil
	}
	before := identityOf(object)
	var document any = object
	for _, o := range operations {
		path, err := o.pointer()
		if err == nil {
			document, err = o.apply(document, path)
		}
		if err != nil {
			return nil, fmt.Errorf("%s %q: %w", cmp.Or(o.Op, opReplace), truncate(o.Path, maxError), err)
		}
	}
	patched := document.(map[string]any) // apply does not change its type
	if after := identityOf(patched); !reflect.DeepEqual(before, after) {
		return nil, errors.New("overrides may not change kind, group, name, namespace, uid, resourceVersion and ownerReferences")
	}
	for key := range patched["metadata"].(map[string]any) { // identityOf has seen its name
		if !slices.Contains([]string{"name", "namespace", "uid", "resourceVersion", "ownerReferences", "labels", "annotations", "finalizers"}, key) {
			return nil, fmt.Errorf("overrides may not set metadata.%s", truncate(key, 64))
		}
	}
	if data, err := json.Marshal(patched); err != nil || len(data) > maxObject {
		return nil, errors.New("the object has over 1.5 MiB")
	}
	return patched, nil
}

// identity is what overrides must leave alone.
type identity struct{ Kind, Group, Name, Namespace, UID, ResourceVersion, Owners any }

func identityOf(object map[string]any) identity {
	metadata, _ := object["metadata"].(map[string]any)
	owners := runtime.DeepCopyJSONValue(metadata["ownerReferences"]) // operations change lists in place
	return identity{object["kind"], groupOf(object), metadata["name"], metadata["namespace"], metadata["uid"], metadata["resourceVersion"], owners}
}

// groupOf returns the group of an object, or what no group is.
func groupOf(object map[string]any) string {
	text, _ := object["apiVersion"].(string)
	if gv, err := schema.ParseGroupVersion(text); err == nil && gv.Version != "" {
		return gv.Group
	}
	return "/"
}

func deepCopy(object map[string]any) map[string]any {
	return runtime.DeepCopyJSONValue(object).(map[string]any)
}
