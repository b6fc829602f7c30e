// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package controllertest

import (
	"bytes"
	"os"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"sigs.k8s.io/yaml"
)

// ReadYAML returns the objects in files of YAML, such as a CustomResourceDefinition.
func ReadYAML(t testing.TB, files ...string) []runtime.Object {
	t.Helper()
	var objects []runtime.Object
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, document := range bytes.Split(append([]byte("\n"), text...), []byte("\n---")) {
			asJSON, err := yaml.YAMLToJSON(document)
			if err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			if string(asJSON) == "null" {
				continue
			}
			obj := &unstructured.Unstructured{}
			if err := obj.UnmarshalJSON(asJSON); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			objects = append(objects, obj)
		}
	}
	return objects
}
