// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/streaming"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/watch"
	restwatch "k8s.io/client-go/rest/watch"
)

// stream is a watch that whoever reads it decodes. The watches of client-go's clients decode in a
// goroutine of their own; to wake that one up too costs as much as to decode a small event.
type stream interface {
	// next waits for the next event. It returns false when the watch has ended.
	next() (watch.Event, bool)
	// stop ends the watch, and with it a next that waits. It may be called more than once.
	stop()
}

// errNoAnswer is the error of a watch that did not begin.
var errNoAnswer = errors.New("the connection broke or timed out before the server responded")

// decodedStream decodes the body of a response.
type decodedStream struct {
	body       io.ReadCloser
	cancel     context.CancelFunc // of the request
	serializer runtime.NegotiatedSerializer
	version    schema.GroupVersion
	decoder    *restwatch.Decoder // nil until the first event
	ended      bool
	stopped    atomic.Bool
}

func (s *decodedStream) stop() {
	s.stopped.Store(true)
	s.cancel()
	_ = s.body.Close()
}

func (s *decodedStream) next() (watch.Event, bool) {
	if s.ended {
		return watch.Event{}, false
	}
	event, err := s.decode()
	if err == nil {
		return event, true
	}
	s.ended = true
	if s.stopped.Load() || errors.Is(err, io.ErrUnexpectedEOF) || utilnet.IsProbableEOF(err) || utilnet.IsTimeout(err) {
		return watch.Event{}, false
	}
	report := apierrors.NewClientErrorReporter(http.StatusInternalServerError, http.MethodGet, "ClientWatchDecoding")
	return watch.Event{Type: watch.Error, Object: report.AsObject(fmt.Errorf("decode an event: %w", err))}, true
}

func (s *decodedStream) decode() (watch.Event, error) {
	if s.decoder == nil {
		if err := s.begin(); err != nil {
			return watch.Event{}, err
		}
	}
	kind, obj, err := s.decoder.Decode()
	return watch.Event{Type: kind, Object: obj}, err
}

// begin finds out the encoding from the first byte, since the client does not tell the content type of a
// stream. In protobuf that byte is the highest of an event's length.
func (s *decodedStream) begin() error {
	body := bufio.NewReader(s.body)
	first, err := body.Peek(1)
	if err != nil {
		return err
	}
	mediaType := runtime.ContentTypeProtobuf
	if first[0] == '{' {
		mediaType = runtime.ContentTypeJSON
	}
	info, ok := runtime.SerializerInfoForMediaType(s.serializer.SupportedMediaTypes(), mediaType)
	if !ok || info.StreamSerializer == nil {
		return fmt.Errorf("no serializer for streams of %s", mediaType)
	}
	frames := info.StreamSerializer.NewFrameReader(io.NopCloser(body))
	s.decoder = restwatch.NewDecoder(streaming.NewDecoder(frames, info.StreamSerializer.Serializer),
		s.serializer.DecoderToVersion(info.Serializer, s.version))
	return nil
}

// channelStream is the watch of one of client-go's clients.
type channelStream struct {
	watch.Interface
	done chan struct{}
	once sync.Once
}

// newChannelStream returns errNoAnswer for the empty watch that client-go's REST client returns when the
// connection still breaks or times out after ten attempts.
func newChannelStream(w watch.Interface) (stream, error) {
	if reflect.TypeOf(w) == reflect.TypeOf(watch.NewEmptyWatch()) {
		return nil, errNoAnswer
	}
	return &channelStream{Interface: w, done: make(chan struct{})}, nil
}

func (s *channelStream) stop() {
	s.once.Do(func() {
		close(s.done)
		s.Stop()
	})
}

func (s *channelStream) next() (watch.Event, bool) {
	select {
	case event, ok := <-s.ResultChan():
		return event, ok
	case <-s.done:
		return watch.Event{}, false
	}
}
