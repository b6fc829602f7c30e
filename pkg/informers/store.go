// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

import (
	"hash/maphash"
	"sync"
)

// store holds the objects of an informer by their keys, and its indexes. The caller calls put and addIndex
// one at a time. Both call the functions of indexes without mu, so that get, list and byIndex do not wait
// for a function that hangs.
type store struct {
	mu      sync.RWMutex
	objects set
	indexes map[string]*index
}

// index has the objects by the values that the function returns for them.
type index struct {
	valuesOf func(*Object) []string
	objects  map[string]*set
}

func newStore() *store { return &store{indexes: map[string]*index{}} }

// get returns the object with a key, or nil.
func (s *store) get(key string) *Object {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.objects.get(key)
}

// put stores the object with a key in place of the present one; nil removes it.
func (s *store) put(key string, o *Object) {
	before := s.get(key)
	type change struct {
		*index
		removed, added []string
	}
	changes := make([]change, 0, len(s.indexes))
	for _, i := range s.indexes {
		changes = append(changes, change{i, i.values(before), i.values(o)})
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if o == nil {
		s.objects.remove(key)
	} else {
		s.objects.put(o)
	}
	for _, c := range changes {
		c.remove(key, c.removed)
		c.add(o, c.added)
	}
}

// list returns the objects in no order.
func (s *store) list() []*Object {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.objects.list()
}

// byIndex returns the objects that have a value in an index, in no order, and whether there is such an
// index.
func (s *store) byIndex(name, value string) (objects []*Object, exists bool) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	i, exists := s.indexes[name]
	if !exists {
		return nil, false
	}
	if found := i.objects[value]; found != nil {
		objects = found.list()
	}
	return objects, true
}

// addIndex adds an index and reports whether the name was free. It leaves an index of that name as it is.
func (s *store) addIndex(name string, valuesOf func(*Object) []string) bool {
	if s.indexes[name] != nil {
		return false
	}
	i := &index{valuesOf, map[string]*set{}}
	for _, o := range s.list() {
		i.add(o, i.values(o))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.indexes[name] = i
	return true
}

// values returns the values of an object, or none for nil.
func (i *index) values(o *Object) []string {
	if o == nil {
		return nil
	}
	return i.valuesOf(o)
}

func (i *index) add(o *Object, values []string) {
	for _, value := range values {
		if i.objects[value] == nil {
			i.objects[value] = &set{}
		}
		i.objects[value].put(o)
	}
}

func (i *index) remove(key string, values []string) {
	for _, value := range values {
		objects := i.objects[value]
		if objects == nil {
			continue // the function returned the value twice
		}
		objects.remove(key)
		if objects.count == 0 {
			delete(i.objects, value)
		}
	}
}

// set has objects by their keys. It is a hash table with linear probing, of nothing but pointers, since the
// objects have the keys. An object takes 13 bytes in it, and more than 40 in a map: with 200,000 Secrets and
// one index, maps would take 11 MiB more, an eighth of what the manager takes.
type set struct {
	slots []*Object // an object is in the slot of its hash or, if that was taken, in the next free one
	count int
}

var hashSeed = maphash.MakeSeed()

// find returns the slot that has the object with a key, or the free one where it belongs.
func (s *set) find(key string) int {
	i := int(maphash.String(hashSeed, key) % uint64(len(s.slots)))
	for s.slots[i] != nil && s.slots[i].key() != key {
		i = (i + 1) % len(s.slots)
	}
	return i
}

func (s *set) get(key string) *Object {
	if s.count == 0 {
		return nil
	}
	return s.slots[s.find(key)]
}

// put adds an object in place of the one with its key.
func (s *set) put(o *Object) {
	if s.count >= len(s.slots)*3/4 {
		s.resize(len(s.slots)*3/2 + 2)
	}
	i := s.find(o.key())
	if s.slots[i] == nil {
		s.count++
	}
	s.slots[i] = o
}

func (s *set) remove(key string) {
	if s.get(key) == nil {
		return
	}
	i := s.find(key)
	s.slots[i] = nil
	s.count--
	// An object behind it may belong into the slot that is free now.
	for i = (i + 1) % len(s.slots); s.slots[i] != nil; i = (i + 1) % len(s.slots) {
		o := s.slots[i]
		s.slots[i] = nil
		s.slots[s.find(o.key())] = o
	}
	if s.count < len(s.slots)/4 {
		s.resize(len(s.slots) / 2)
	}
}

func (s *set) resize(slots int) {
	objects := s.list()
	s.slots = make([]*Object, slots)
	for _, o := range objects {
		s.slots[s.find(o.key())] = o
	}
}

// list returns the objects in the order of their slots.
func (s *set) list() []*Object {
	list := make([]*Object, 0, s.count)
	for _, o := range s.slots {
		if o != nil {
			list = append(list, o)
		}
	}
	return list
}
