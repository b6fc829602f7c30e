// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"maps"
	"slices"
	"sync"
)

// store holds the objects of an informer by their keys, and its indexes. client-go's store has interfaces in
// place of pointers, and keys in place of the objects in its indexes, which take twice the memory.
type store struct {
	mu      sync.RWMutex
	objects map[string]*Object
	indexes map[string]*index
}

// index has the objects by the values that the function returns for them.
type index struct {
	valuesOf func(*Object) []string
	objects  map[string]map[*Object]struct{}
}

func newStore() *store {
	return &store{objects: map[string]*Object{}, indexes: map[string]*index{}}
}

// get returns the object with a key, or nil.
func (s *store) get(key string) *Object {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.objects[key]
}

// put stores the object with a key in place of the present one; nil removes it.
func (s *store) put(key string, o *Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	before := s.objects[key]
	if o == nil {
		delete(s.objects, key)
	} else {
		s.objects[key] = o
	}
	for _, i := range s.indexes {
		if before != nil {
			i.remove(before)
		}
		if o != nil {
			i.add(o)
		}
	}
}

// list returns the objects in random order.
func (s *store) list() []*Object {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.AppendSeq(make([]*Object, 0, len(s.objects)), maps.Values(s.objects))
}

// keys returns the keys of the objects in random order.
func (s *store) keys() []string {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.AppendSeq(make([]string, 0, len(s.objects)), maps.Keys(s.objects))
}

// byIndex returns the objects that have a value in an index, in random order, and whether there is such an
// index.
func (s *store) byIndex(name, value string) (objects []*Object, exists bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	i, exists := s.indexes[name]
	if !exists {
		return nil, false
	}
	found := i.objects[value]
	return slices.AppendSeq(make([]*Object, 0, len(found)), maps.Keys(found)), true
}

// addIndex adds an index, unless there is one of that name.
func (s *store) addIndex(name string, valuesOf func(*Object) []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.indexes[name] != nil {
		return
	}
	i := &index{valuesOf, map[string]map[*Object]struct{}{}}
	s.indexes[name] = i
	for _, o := range s.objects {
		i.add(o)
	}
}

func (i *index) add(o *Object) {
	for _, value := range i.valuesOf(o) {
		if i.objects[value] == nil {
			i.objects[value] = map[*Object]struct{}{}
		}
		i.objects[value][o] = struct{}{}
	}
}

func (i *index) remove(o *Object) {
	for _, value := range i.valuesOf(o) {
		if delete(i.objects[value], o); len(i.objects[value]) == 0 {
			delete(i.objects, value)
		}
	}
}
