// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"encoding/binary"
	"encoding/json"
	"net/http/httptest"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/quartermaster-dev/quartermaster/internal/assert"
)

func encodeFrame(t *testing.T, kind string) string {
	t.Helper()
	e := metav1.WatchEvent{Type: kind}
	b, err := e.Marshal()
	assert.NoError(t, err)
	return string(binary.BigEndian.AppendUint32(nil, uint32(len(b)))) + string(b)
}

func encodeLine(t *testing.T, kind string) string {
	t.Helper()
	b, err := json.Marshal(metav1.WatchEvent{Type: kind})
	assert.NoError(t, err)
	return string(b) + "\n"
}

func TestBookmarkFilterWorksAtEveryCut(t *testing.T) {
	for contentType, event := range map[string]func(*testing.T, string) string{
		"application/json": encodeLine,
		"application/vnd.kubernetes.protobuf;stream=watch": encodeFrame,
	} {
		t.Run(contentType, func(t *testing.T) {
			stream := event(t, "BOOKMARK") + event(t, "ADDED") + event(t, "BOOKMARK") + event(t, "BOOKMARK") + event(t, "DELETED")
			want := event(t, "ADDED") + event(t, "DELETED")
			for cut := range len(stream) {
				w := httptest.NewRecorder()
				w.Header().Set("Content-Type", contentType)
				f := &bookmarkFilter{ResponseWriter: w}
				for _, part := range []string{stream[:cut], stream[cut:]} {
					if n, err := f.Write([]byte(part)); n != len(part) || err != nil {
						t.Fatalf("cut at %d: wrote %d of %d, %v", cut, n, len(part), err)
					}
				}
				if got := w.Body.String(); got != want {
					t.Fatalf("cut at %d: %q, want %q", cut, got, want)
				}
			}
		})
	}
}
