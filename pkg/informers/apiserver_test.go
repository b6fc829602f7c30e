// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"
)

const protobuf = runtime.ContentTypeProtobuf

// apiServer serves a cluster's Secrets over HTTP in the encoding of a real API server.
type apiServer struct{ secrets *cluster }

func (s *apiServer) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	var opts metav1.ListOptions
	if err := metav1.Convert_url_Values_To_v1_ListOptions(ptr.To(req.URL.Query()), &opts, nil); err != nil {
		writeError(w, err)
		return
	}
	onlyMetadata := strings.Contains(req.Header.Get("Accept"), "as=PartialObjectMetadata")
	if !opts.Watch {
		list, err := s.secrets.list(req.Context(), opts)
		if err != nil {
			writeError(w, err)
			return
		}
		w.Header().Set("Content-Type", protobuf)
		_, _ = w.Write(encode(convert(list, onlyMetadata)))
		return
	}
	events, err := s.secrets.watch(req.Context(), opts)
	if err != nil {
		writeError(w, err)
		return
	}
	defer events.Stop()
	w.Header().Set("Content-Type", protobuf+";stream=watch")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	frames := info().StreamSerializer.NewFrameWriter(w)
	for e := range events.ResultChan() {
		if _, err := frames.Write(encodeEvent(e, onlyMetadata)); err != nil {
			return
		}
		w.(http.Flusher).Flush()
	}
}

func encodeEvent(e watch.Event, onlyMetadata bool) []byte {
	var b bytes.Buffer
	event := metav1.WatchEvent{Type: string(e.Type), Object: runtime.RawExtension{Raw: encode(convert(e.Object, onlyMetadata))}}
	if err := info().StreamSerializer.Encode(&event, &b); err != nil {
		panic(err)
	}
	return b.Bytes()
}

func info() runtime.SerializerInfo {
	i, ok := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), protobuf)
	if !ok {
		panic("no protobuf")
	}
	return i
}

func encode(obj runtime.Object) []byte {
	var b bytes.Buffer
	if err := info().Serializer.Encode(obj, &b); err != nil {
		panic(err)
	}
	return b.Bytes()
}

// convert sets kinds as the server does, and reduces objects to their metadata if asked.
func convert(obj runtime.Object, onlyMetadata bool) runtime.Object {
	switch o := obj.(type) {
	case *corev1.SecretList:
		o.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("SecretList"))
		if !onlyMetadata {
			return o
		}
		list := &metav1.PartialObjectMetadataList{ListMeta: o.ListMeta}
		list.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadataList"))
		for i := range o.Items {
			list.Items = append(list.Items, *convert(&o.Items[i], true).(*metav1.PartialObjectMetadata))
		}
		return list
	case *corev1.Secret:
		o.SetGroupVersionKind(corev1.SchemeGroupVersion.WithKind("Secret"))
		if !onlyMetadata {
			return o
		}
		m := meta.AsPartialObjectMetadata(o)
		m.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PartialObjectMetadata"))
		return m
	}
	return obj
}

func writeError(w http.ResponseWriter, err error) {
	status := apierrors.NewInternalError(err).Status()
	if known := apierrors.APIStatus(nil); errors.As(err, &known) {
		status = known.Status()
	}
	status.Kind, status.APIVersion = "Status", "v1"
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(status.Code))
	_ = json.NewEncoder(w).Encode(status)
}

// clientsOf returns clients as the manager builds them.
func clientsOf(t testing.TB, config *rest.Config) Clients {
	t.Helper()
	clients, err := NewClients(config, scheme.Scheme)
	if err != nil {
		t.Fatal(err)
	}
	return clients
}

func serve(t *testing.T, s *apiServer) Clients {
	t.Helper()
	server := httptest.NewServer(s)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return clientsOf(t, &rest.Config{Host: server.URL})
}
