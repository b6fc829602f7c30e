// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package faultproxy

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"net/http"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

// frameHeader is the length, big-endian, before every event of a watch in protobuf.
const frameHeader = 4

// bookmarkFilter passes on the events of a watch, except for bookmarks. An incomplete event waits
// for the rest.
type bookmarkFilter struct {
	http.ResponseWriter
	pending []byte
}

// Unwrap lets the reverse proxy flush.
func (f *bookmarkFilter) Unwrap() http.ResponseWriter { return f.ResponseWriter }

func (f *bookmarkFilter) Write(b []byte) (int, error) {
	split := splitLine
	if strings.Contains(f.Header().Get("Content-Type"), "protobuf") {
		split = splitFrame
	}
	f.pending = append(f.pending, b...)
	for {
		event, kind, err := split(f.pending)
		if err != nil {
			return 0, err
		}
		if event == nil {
			return len(b), nil
		}
		if kind != string(watch.Bookmark) {
			if _, err := f.ResponseWriter.Write(event); err != nil {
				return 0, err
			}
		}
		f.pending = f.pending[len(event):]
	}
}

// splitFrame returns the first event in protobuf and its type, or nil while it is incomplete.
func splitFrame(b []byte) (event []byte, kind string, err error) {
	if len(b) < frameHeader {
		return nil, "", nil
	}
	n := frameHeader + int(binary.BigEndian.Uint32(b))
	if len(b) < n {
		return nil, "", nil
	}
	var e metav1.WatchEvent
	if err := e.Unmarshal(b[frameHeader:n]); err != nil {
		return nil, "", errors.Join(errors.New("not an event of a watch"), err)
	}
	return b[:n], e.Type, nil
}

// splitLine is splitFrame for JSON.
func splitLine(b []byte) (event []byte, kind string, err error) {
	n := bytes.IndexByte(b, '\n') + 1
	if n == 0 {
		return nil, "", nil
	}
	var e struct{ Type string }
	if err := json.Unmarshal(b[:n], &e); err != nil {
		return nil, "", errors.Join(errors.New("not an event of a watch"), err)
	}
	return b[:n], e.Type, nil
}
