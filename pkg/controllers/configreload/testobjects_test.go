// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package configreload_test

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/configreload/policy"
)

// The full hashes of the fixture's sources.
const (
	hash1   = "fc284a838ce31ea4fb2467fe13c7ac02add6ef3c"
	hash2   = "021bc5a93e1158e601054a83173249b9c3f8d40d"
	dbHash1 = "e013dcfd8b3a9e80e812740978788202e1ef1325"
	dbHash2 = "e1f0b16200882bc8804ce5393e673fef02e6e2e5"
)

const (
	cmVar = "STAKATER_APP_CONFIG_CONFIGMAP"
	dbVar = "STAKATER_DB_SECRET"
)

// Annotations, as users write them and as package policy has them.
const (
	nativeState    = policy.StateKey
	nativeReload   = "quartermaster.dev/reload"
	nativeDelay    = "quartermaster.dev/reload-delay"
	nativeMark     = "quartermaster.dev/reloaded-from"
	compatMark     = "reloader.stakater.com/last-reloaded-from"
	compatStrategy = "reloader.stakater.com/rollout-strategy"
)

type object = policy.Object

const (
	stateDigits = 16
	deletedHash = "aae45badef99284e4dae01d6046154ea9d99532f"
)

func nullIfEmpty(text string) any {
	if text == "" {
		return nil
	}
	return text
}

// stateOf returns a state annotation of the Deployment web with shortened hashes. The pairs are keys
// and hashes.
func stateOf(pairs ...string) string { return stateOn("Deployment/shop/web", pairs...) }

// stateOn is stateOf for another workload.
func stateOn(workload string, pairs ...string) string {
	s := map[string]string{"workload": workload}
	for i := 0; i < len(pairs); i += 2 {
		s[pairs[i]] = pairs[i+1][:min(stateDigits, len(pairs[i+1]))]
	}
	return toJSON(s)
}

// recordedOn returns the state as a manager records it on a version of its workload.
func recordedOn(version, state string) string {
	var s map[string]string
	if err := json.Unmarshal([]byte(state), &s); err != nil {
		panic(err)
	}
	s["version"] = version
	return toJSON(s)
}

// withoutVersion undoes recordedOn and returns the version.
func withoutVersion(recorded string) (state, version string) {
	var s map[string]string
	if err := json.Unmarshal([]byte(recorded), &s); err != nil {
		return recorded, ""
	}
	version = s["version"]
	delete(s, "version")
	return toJSON(s), version
}

const (
	cmKey = "configmap/app-config"
	dbKey = "secret/db"
)

// envPatch returns the patch of the env-vars strategy on the Deployment web: the state, and pairs of
// container/variable and hash, of one container. An empty hash removes the variable.
func envPatch(state string, pairs ...string) string { return envOn("deployments/web", state, pairs...) }

func envOn(target, state string, pairs ...string) string {
	return "patch " + target + " " + toJSON(envBody(state, pairs...))
}

// envWithoutState is envPatch without a state.
func envWithoutState(pairs ...string) string {
	body := envBody("", pairs...)
	delete(body, "metadata")
	return "patch deployments/web " + toJSON(body)
}

func envBody(state string, pairs ...string) object {
	var container string
	var variables []object
	for i := 0; i < len(pairs); i += 2 {
		v := object{"value": pairs[i+1]}
		if pairs[i+1] == "" {
			v = object{"$patch": "delete"}
		}
		container, v["name"], _ = strings.Cut(pairs[i], "/")
		variables = append(variables, v)
	}
	return object{
		"metadata": object{"annotations": object{nativeState: nullIfEmpty(state)}},
		"spec":     object{"template": object{"spec": object{"containers": []object{{"name": container, "env": variables}}}}},
	}
}

// markOf returns the annotation that marks a template for app-config, n seconds after the start.
func markOf(hash string, n int) string {
	return fmt.Sprintf(`{"type":"CONFIGMAP","name":"app-config","namespace":"shop","hash":%q,"containerRefs":["web"],"observedAt":%d}`, hash, startSecond+n)
}

// annotationPatch returns the patch of the annotations strategy.
func annotationPatch(state, key, hash string, n int) string {
	return "patch deployments/web " + toJSON(object{
		"metadata": object{"annotations": object{nativeState: state}},
		"spec":     object{"template": object{"metadata": object{"annotations": object{key: markOf(hash, n)}}}},
	})
}

// statePatch returns a patch of the metadata alone; an empty state removes the annotation.
func statePatch(state string) string {
	return "patch deployments/web " + toJSON(object{"metadata": object{"annotations": object{nativeState: nullIfEmpty(state)}}})
}

// sources

func cm(name string, data ...string) *corev1.ConfigMap {
	c := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name}, Data: map[string]string{}}
	for i := 0; i < len(data); i += 2 {
		c.Data[data[i]] = data[i+1]
	}
	return c
}

func hashOf(data ...string) string {
	return hex.EncodeToString(policy.DigestConfigMap(cm("", data...)))
}

func cm1() *corev1.ConfigMap { return cm("app-config", "color", "blue", "size", "10") }
func cm2() *corev1.ConfigMap { return cm("app-config", "color", "red", "size", "10") }

func db(password string) *corev1.Secret {
	return &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "db"},
		Data:       map[string][]byte{"user": []byte("admin"), "password": []byte(password)},
	}
}

func db1() *corev1.Secret { return db("s3cr3t") }
func db2() *corev1.Secret { return db("n3wpass") }

func annotated[T metav1.Object](obj T, pairs ...string) T {
	a := map[string]string{}
	maps.Copy(a, obj.GetAnnotations())
	for i := 0; i < len(pairs); i += 2 {
		a[pairs[i]] = pairs[i+1]
	}
	obj.SetAnnotations(a)
	return obj
}

// labelled returns a source with the label env=prod.
func labelled[T metav1.Object](obj T) T {
	obj.SetLabels(map[string]string{"env": "prod"})
	return obj
}

// workloads

type podOption func(*corev1.PodTemplateSpec)

// pod returns a template with the container web, which reads app-config.
func pod(options ...podOption) corev1.PodTemplateSpec {
	t := corev1.PodTemplateSpec{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "web", Image: "registry.example/web:1"}}}}
	for _, o := range options {
		o(&t)
	}
	return t
}

func reads(name string) podOption {
	return func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].EnvFrom = append(t.Spec.Containers[0].EnvFrom, corev1.EnvFromSource{
			ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: name}},
		})
	}
}

func readsSecret(name string) podOption {
	return func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].Env = append(t.Spec.Containers[0].Env, corev1.EnvVar{
			Name: "PASSWORD", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{
				LocalObjectReference: corev1.LocalObjectReference{Name: name}, Key: "password",
			}},
		})
	}
}

func variableSet(name, value string) podOption {
	return func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers[0].Env = append(t.Spec.Containers[0].Env, corev1.EnvVar{Name: name, Value: value})
	}
}

func onTemplate(pairs ...string) podOption {
	return func(t *corev1.PodTemplateSpec) {
		t.SetAnnotations(annotated(&t.ObjectMeta, pairs...).Annotations)
	}
}

func containersNamed(names ...string) podOption {
	return func(t *corev1.PodTemplateSpec) {
		t.Spec.Containers = nil
		for _, name := range names {
			t.Spec.Containers = append(t.Spec.Containers, corev1.Container{Name: name})
		}
	}
}

// web is the template that reads app-config. Most tests have the Deployment auto(web, known1), which is
// marked by a variable when app-config changes.
var (
	web                         = pod(reads("app-config"))
	state1, state2, stateAbsent = stateOf(cmKey, hash1), stateOf(cmKey, hash2), stateOf(cmKey, "")
	rollPatch                   = envPatch(state2, "web/"+cmVar, hash2)
	rollPatches                 = []string{rollPatch}
)

func marked(hash string) corev1.PodTemplateSpec {
	return pod(reads("app-config"), variableSet(cmVar, hash))
}

// autoWeb returns the Deployment web with this state, which rolls for whatever it refers to.
func autoWeb(template corev1.PodTemplateSpec, state string) *appsv1.Deployment {
	return deploy(template, kAuto, "true", nativeState, state)
}

// deploy returns the Deployment web with annotations.
func deploy(template corev1.PodTemplateSpec, annotations ...string) *appsv1.Deployment {
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
	d.Spec.Template = template
	if len(annotations) > 0 {
		annotated(d, annotations...)
	}
	return d
}
