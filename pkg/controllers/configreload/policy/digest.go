// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"crypto/sha1" // The hash has to equal the one in existing marks; it protects nothing.
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"hash"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/quartermaster-dev/quartermaster/pkg/controllers/internal/glob"
)

// deletedHash is the SHA-1 of the text that stands for a deleted source.
const deletedHash = "aae45badef99284e4dae01d6046154ea9d99532f"

// helmRelease Secrets hold a release's history; nothing mounts them.
const helmRelease = "helm.sh/release.v1"

// DigestConfigMap returns the SHA-1 (20 bytes) of the entries, key=value for data and key=base64
// for binaryData, sorted bytewise and joined by semicolons. Nothing else of the object is hashed.
func DigestConfigMap(cm *corev1.ConfigMap) []byte {
	entries := make([]string, 0, len(cm.Data)+len(cm.BinaryData))
	for key := range cm.Data {
		entries = append(entries, key+"=")
	}
	for key := range cm.BinaryData {
		entries = append(entries, key+"=")
	}
	return digest(entries, func(h *hasher, key string) {
		if value, ok := cm.Data[key]; ok {
			h.writeString(value)
			return
		}
		enc := base64.NewEncoder(base64.StdEncoding, h)
		_, _ = enc.Write(cm.BinaryData[key])
		_ = enc.Close()
	})
}

// DigestSecret is like DigestConfigMap, for the raw bytes of a Secret's data.
func DigestSecret(s *corev1.Secret) []byte {
	entries := make([]string, 0, len(s.Data))
	for key := range s.Data {
		entries = append(entries, key+"=")
	}
	return digest(entries, func(h *hasher, key string) { _, _ = h.Write(s.Data[key]) })
}

// digest takes the keys of the entries, each with the = that follows it. Sorting the keys sorts whole
// entries: keys are unique (the API server refuses a key that is both in data and in binaryData) and cannot
// contain a =. Writing to a hash never fails.
func digest(entries []string, write func(h *hasher, key string)) []byte {
	slices.Sort(entries)
	h := &hasher{Hash: sha1.New()}
	for i, entry := range entries {
		if i > 0 {
			h.writeString(";")
		}
		h.writeString(entry)
		write(h, strings.TrimSuffix(entry, "="))
	}
	return h.Sum(nil)
}

// hasher hashes strings without copying them as a whole, as io.WriteString does for a hash.
type hasher struct {
	hash.Hash
	part [sha1.BlockSize]byte
}

func (h *hasher) writeString(s string) {
	for len(s) > 0 {
		n := copy(h.part[:], s)
		_, _ = h.Write(h.part[:n])
		s = s[n:]
	}
}

// DigestSource returns the digest of a ConfigMap, a Secret or the status of a class's pod. It returns
// nil for an object that does not count, because selector does not select it or because it holds a Helm
// release.
func DigestSource(obj runtime.Object, selector labels.Selector) []byte {
	switch o := obj.(type) {
	case *corev1.ConfigMap:
		if selector.Matches(labels.Set(o.Labels)) {
			return DigestConfigMap(o)
		}
	case *corev1.Secret:
		if o.Type != helmRelease && selector.Matches(labels.Set(o.Labels)) {
			return DigestSecret(o)
		}
	case *unstructured.Unstructured:
		return digestPodStatus(o)
	}
	return nil
}

// digestPodStatus returns the digest of what a pod has mounted of a SecretProviderClass, and the
// name of the class.
func digestPodStatus(o *unstructured.Unstructured) []byte {
	class, _, _ := unstructured.NestedString(o.Object, "status", "secretProviderClassName")
	objects, _, _ := unstructured.NestedSlice(o.Object, "status", "objects")
	if class == "" || len(class) > glob.MaxName || len(objects) == 0 {
		return nil // nothing is mounted yet
	}
	lines := []string{"SecretProviderClassName=" + class}
	for _, object := range objects {
		fields, _ := object.(map[string]any)
		lines = append(lines, fmt.Sprintf("%v=%v", fields["id"], fields["version"]))
	}
	slices.Sort(lines)
	sum := sha1.Sum([]byte(strings.Join(lines, ";")))
	return append(sum[:], class...)
}

// ParseDigest returns the hash in what DigestSource returned, and for a pod's status the name of its
// class.
func ParseDigest(digest []byte) (hash, class string) {
	n := min(len(digest), sha1.Size)
	return hex.EncodeToString(digest[:n]), string(digest[n:])
}
