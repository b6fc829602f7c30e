// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/quartermaster-dev/quartermaster/pkg/app"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/builtin"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl"
	"github.com/quartermaster-dev/quartermaster/pkg/controllers/ttl/policy/rules"
)

// values are the chart's values, apart from the flags. The schema is made from it.
type values struct {
	Image struct {
		Repository string            `json:"repository"`
		Tag        string            `json:"tag"`
		Digest     string            `json:"digest"`
		PullPolicy corev1.PullPolicy `json:"pullPolicy"`
	} `json:"image"`
	ImagePullSecrets []corev1.LocalObjectReference `json:"imagePullSecrets"`
	ReplicaCount     int                           `json:"replicaCount"`

	Compat      []string       `json:"compat"`
	Controllers map[string]any `json:"controllers"` // see valuesSchema
	Flags       map[string]any `json:"flags"`
	ExtraArgs   []string       `json:"extraArgs"`

	Namespaced struct {
		Enabled              bool     `json:"enabled"`
		AdditionalNamespaces []string `json:"additionalNamespaces"`
	} `json:"namespaced"`
	Fence             toggle `json:"fence"`
	ReplicationPolicy toggle `json:"replicationPolicy"`
	FlowSchema        toggle `json:"flowSchema"`
	RBAC              struct {
		Create bool `json:"create"`
	} `json:"rbac"`
	ServiceAccount struct {
		Create      bool              `json:"create"`
		Annotations map[string]string `json:"annotations"`
	} `json:"serviceAccount"`
	NetworkPolicy struct {
		Enabled        bool `json:"enabled"`
		RestrictEgress bool `json:"restrictEgress"`
	} `json:"networkPolicy"`
	PodDisruptionBudget struct {
		Enabled        bool               `json:"enabled"`
		MaxUnavailable intstr.IntOrString `json:"maxUnavailable"`
	} `json:"podDisruptionBudget"`

	ServiceMonitor struct {
		Enabled   bool              `json:"enabled"`
		Interval  string            `json:"interval"`
		Labels    map[string]string `json:"labels"`
		TLSConfig map[string]any    `json:"tlsConfig"`
	} `json:"serviceMonitor"`
	PrometheusRule struct {
		Enabled bool              `json:"enabled"`
		Labels  map[string]string `json:"labels"`
	} `json:"prometheusRule"`
	Dashboards struct {
		Enabled     bool              `json:"enabled"`
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	} `json:"dashboards"`

	Annotations                   map[string]string                 `json:"annotations"`
	PodAnnotations                map[string]string                 `json:"podAnnotations"`
	PodLabels                     map[string]string                 `json:"podLabels"`
	Resources                     corev1.ResourceRequirements       `json:"resources"`
	PriorityClassName             string                            `json:"priorityClassName"`
	TerminationGracePeriodSeconds int                               `json:"terminationGracePeriodSeconds"`
	NodeSelector                  map[string]string                 `json:"nodeSelector"`
	Tolerations                   []corev1.Toleration               `json:"tolerations"`
	Affinity                      corev1.Affinity                   `json:"affinity"`
	TopologySpreadConstraints     []corev1.TopologySpreadConstraint `json:"topologySpreadConstraints"`
	PodSecurityContext            corev1.PodSecurityContext         `json:"podSecurityContext"`
	SecurityContext               corev1.SecurityContext            `json:"securityContext"`
	ExtraEnv                      []corev1.EnvVar                   `json:"extraEnv"`
	ExtraVolumes                  []corev1.Volume                   `json:"extraVolumes"`
	ExtraVolumeMounts             []corev1.VolumeMount              `json:"extraVolumeMounts"`

	// Helm adds this value to a chart that is part of another chart.
	Global map[string]any `json:"global"`
}

type toggle struct {
	Enabled bool `json:"enabled"`
}

// notFlags are flags that are not values of the chart.
var notFlags = []string{
	// The chart sets these from other values or from the release.
	"compat", "controllers", "leader-elect-resource-namespace", "namespaces",
	// These are not settings.
	"help", "print-effective-config", "version",
}

type schema map[string]any

// valuesSchema returns the JSON schema of the chart's values, which refuses what is unknown.
func valuesSchema() ([]byte, error) {
	s := schemaOf(reflect.TypeFor[values]())
	s["$schema"] = "http://json-schema.org/draft-07/schema#"
	properties := s["properties"].(schema)
	properties["compat"] = schema{"type": "array", "items": schema{"enum": settingNames("compat=")}}
	properties["replicaCount"] = schema{"type": "integer", "minimum": 0}

	// A controller is known by the flags that begin with its name.
	general, controllers := schema{}, schema{}
	controllerFlags := map[string]schema{}
	roles, err := chartRoles()
	if err != nil {
		return nil, err
	}
	for _, role := range roles {
		if role.Controller != "" {
			controllerFlags[role.Controller] = schema{}
		}
	}
	app.NewCommand(app.With(builtin.Entries()...)).Flags().VisitAll(func(flag *pflag.Flag) {
		if slices.Contains(notFlags, flag.Name) {
			return
		}
		flags := general
		for name, ownFlags := range controllerFlags {
			if strings.HasPrefix(flag.Name, name+"-") {
				flags = ownFlags
			}
		}
		flags[flag.Name] = schemaOfFlag(flag)
	})
	for name, flags := range controllerFlags {
		section := schema{"enabled": schema{"type": "boolean"}, "flags": closedObject(flags)}
		if name == ttl.Name {
			section["rules"] = schemaOf(reflect.TypeFor[[]rules.Rule]())
		}
		controllers[name] = closedObject(section)
	}
	properties["flags"], properties["controllers"] = closedObject(general), closedObject(controllers)

	text := new(bytes.Buffer)
	encoder := json.NewEncoder(text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	err = encoder.Encode(s)
	return text.Bytes(), err
}

func settingNames(prefix string) (names []string) {
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		if item, ok := strings.CutPrefix(name, prefix); ok {
			names = append(names, item)
		}
	}
	return names
}

// closedObject returns the schema of an object with these properties and no others.
func closedObject(properties schema) schema {
	return schema{"type": "object", "properties": properties, "additionalProperties": false}
}

// schemaOfFlag returns the schema of the values that the flag takes.
func schemaOfFlag(flag *pflag.Flag) schema {
	text, number, boolean := schema{"type": "string"}, schema{"type": "number"}, schema{"type": "boolean"}
	switch flag.Value.Type() {
	case "bool":
		return boolean
	case "int", "int32", "Level":
		return schema{"type": "integer"}
	case "float32":
		return number
	case "duration":
		return schema{"type": "string", "pattern": `^(0|([0-9.]+(ns|us|ms|s|m|h))+)$`}
	case "quantity":
		return schema{"type": []string{"string", "integer"}}
	case "stringSlice":
		return schema{"type": "array", "items": text}
	case "int32Slice":
		return schema{"type": "array", "items": schema{"type": "integer"}}
	case "stringToString":
		return schema{"type": "object", "additionalProperties": text}
	case "mapStringBool":
		return schema{"type": "object", "additionalProperties": boolean}
	}
	return text
}

// schemaOf returns the schema of a Go type, as far as values and the types of Kubernetes in it need.
func schemaOf(t reflect.Type) schema {
	switch t {
	case reflect.TypeFor[resource.Quantity](), reflect.TypeFor[intstr.IntOrString]():
		return schema{"type": []string{"string", "integer", "number"}}
	case reflect.TypeFor[metav1.Time]():
		return schema{"type": "string"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(t.Elem())
	case reflect.Slice:
		return schema{"type": "array", "items": schemaOf(t.Elem())}
	case reflect.Map:
		return schema{"type": "object", "additionalProperties": schemaOf(t.Elem())}
	case reflect.Struct:
		properties := schema{}
		for i := range t.NumField() {
			field := t.Field(i)
			if !field.IsExported() {
				continue
			}
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if name == "" { // inlined
				maps.Copy(properties, schemaOf(field.Type)["properties"].(schema))
			} else {
				properties[name] = schemaOf(field.Type)
			}
		}
		return closedObject(properties)
	case reflect.String:
		return schema{"type": "string"}
	case reflect.Bool:
		return schema{"type": "boolean"}
	case reflect.Interface:
		return schema{}
	}
	return schema{"type": "integer"}
}

const tableBegins = "<!-- The table is written by make generate from values.yaml. -->\n"

// chartReadme returns the chart's README with the table of its values.
func chartReadme(dir string) ([]byte, error) {
	readme, err := os.ReadFile(filepath.Join(dir, "README.md"))
	if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(dir, "values.yaml"))
	if err != nil {
		return nil, err
	}
	var document yaml.Node
	if err := yaml.Unmarshal(text, &document); err != nil {
		return nil, err
	}
	before, _, ok := bytes.Cut(readme, []byte(tableBegins))
	if !ok {
		return nil, fmt.Errorf("README.md has no line %q", strings.TrimSpace(tableBegins))
	}
	table := bytes.NewBuffer(before)
	table.WriteString(tableBegins + "\n| value | default | meaning |\n|---|---|---|\n")
	err = tableRows(table, "", document.Content[0])
	return table.Bytes(), err
}

// switches are values that need no comment, since the comment of their group is about them.
var switches = []string{"enabled", "create", "repository"}

// tableRows writes a row for each value that has a comment. The row also stands for the values below it that
// have no comment.
func tableRows(table *bytes.Buffer, path string, mapping *yaml.Node) error {
	for i := 0; i < len(mapping.Content); i += 2 {
		key, value := mapping.Content[i], mapping.Content[i+1]
		name, comment := path+key.Value, key.HeadComment
		if comment != "" {
			var lines []string
			for line := range strings.Lines(comment) {
				lines = append(lines, strings.TrimSpace(strings.TrimPrefix(line, "#")))
			}
			// The comment of a group stands for its switch.
			if value.Kind == yaml.MappingNode && len(value.Content) > 0 {
				if first := value.Content[0]; first.HeadComment == "" && slices.Contains(switches, first.Value) {
					name, value = name+"."+first.Value, value.Content[1]
				}
			}
			var object any
			if err := value.Decode(&object); err != nil {
				return err
			}
			initial, err := json.Marshal(object)
			if err != nil {
				return err
			}
			cell := "`" + string(initial) + "`"
			if value.Kind == yaml.MappingNode && len(value.Content) > 0 {
				cell = "see values.yaml"
			}
			fmt.Fprintf(table, "| `%s` | %s | %s |\n", name, cell, strings.ReplaceAll(strings.Join(lines, " "), "|", `\|`))
		} else if path == "" {
			return fmt.Errorf("values.yaml: %s has no comment", name)
		}
		if child := mapping.Content[i+1]; child.Kind == yaml.MappingNode {
			if err := tableRows(table, path+key.Value+".", child); err != nil {
				return err
			}
		}
	}
	return nil
}
