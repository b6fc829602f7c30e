// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package policy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// Key is a key of the annotations, without the prefix of its family.
type Key uint8

// The keys.
const (
	Uptime Key = iota
	Downtime
	UpscalePeriod
	DownscalePeriod
	ForceUptime
	ForceDowntime
	Exclude
	ExcludeUntil
	DowntimeReplicas
	DownscaleReplicas
	GracePeriod
	// Record is the key of what to return to, in the family that the controller writes; OtherRecord the
	// same in the other family.
	Record
	OtherRecord
	keyCount
)

var keyNames = [keyCount]string{"uptime", "downtime", "upscale-period", "downscale-period", "force-uptime", "force-downtime",
	"exclude", "exclude-until", "downtime-replicas", "downscale-replicas", "grace-period", recordName, recordName}

const (
	nativePrefix = "quartermaster.dev/scale-"
	compatPrefix = "downscaler/"
	recordName   = "original-replicas"
)

// Keys returns the names of all keys, for metrics. The record has one name in both families.
func Keys() []string { return keyNames[:OtherRecord] }

// String returns the name of the key without the prefix of its family.
func (k Key) String() string { return keyNames[k] }

// maxTotal is how long all values of an object may be together, in bytes.
const maxTotal = 4096

// tooLong stands for a value that is too long, or belongs to values that are too long together.
const tooLong = "\xff"

var errTooLong = errors.New("is too long")

// Values are the annotations of one object that count.
type Values struct {
	text   [keyCount]string
	keySet uint16
	// compat says that the values are of the family downscaler/. The record may be of either family.
	compat bool
}

// has reports whether one of the keys is set.
func (v *Values) has(keys ...Key) bool {
	for _, k := range keys {
		if v.keySet&(1<<k) != 0 {
			return true
		}
	}
	return false
}

func (v *Values) put(k Key, text string) {
	v.text[k] = text
	v.keySet |= 1 << k
}

// annotation returns the name of a key as it is on the object.
func (v *Values) annotation(k Key) string {
	if v.compat {
		return compatPrefix + k.String()
	}
	return nativePrefix + k.String()
}

// recordNames returns the annotation in which the record is written, and the other one, which counts
// with compat only.
func recordNames(withCompat bool) (own, other string) {
	if withCompat {
		return compatPrefix + recordName, nativePrefix + recordName
	}
	return nativePrefix + recordName, ""
}

// valuesOf returns what counts of an object's annotations.
func valuesOf(annotations map[string]string, withCompat bool) (values Values) {
	read := func(prefix string) {
		total := 0
		for key := range Record {
			if text, ok := annotations[prefix+keyNames[key]]; ok {
				if total += len(text); len(text) > MaxValue {
					text = tooLong
				}
				values.put(key, text)
			}
		}
		if total > maxTotal {
			for key := range Record {
				if values.has(key) {
					values.text[key] = tooLong
				}
			}
		}
	}
	if read(nativePrefix); values.keySet == 0 && withCompat {
		read(compatPrefix)
		values.compat = true
	}
	own, other := recordNames(withCompat)
	for key, name := range map[Key]string{Record: own, OtherRecord: other} {
		if text, ok := annotations[name]; ok && name != "" {
			if len(text) > len("2147483647") {
				text = tooLong
			}
			values.put(key, text)
		}
	}
	return values
}

// Object is what the cache keeps of a workload, a Namespace or an object that scales a workload.
type Object struct {
	Values
	// Number is what the controller changes: of a CronJob 0 if it is suspended, else 1; of a ScaledObject the
	// replicas at which it is paused, else Unpaused.
	Number int64
	// Max is the maxReplicas of a HorizontalPodAutoscaler.
	Max int64
	// Created is the creation, or the time in the annotation that stands for it.
	Created time.Time
	// ScaleTarget is the workload that this object scales: KIND/NAME.
	ScaleTarget string
	// Unselected says that the selector leaves the object out. Owned says that a ScaledObject owns it.
	Unselected, Owned bool
	// Unreadable says that the number cannot be understood.
	Unreadable bool
}

// Unpaused is the number of a ScaledObject that is not paused. Its record is -1.
const Unpaused = math.MaxInt32 + 1

const (
	bitCompat = 1 << iota
	bitUnselected
	bitOwned
	bitUnreadable
)

func bit(set bool, b byte) byte {
	if set {
		return b
	}
	return 0
}

// Encode returns the object as the cache keeps it; nil if there is nothing in it.
func (o *Object) Encode() []byte {
	if o.keySet == 0 && o.Number == 0 && o.Created.IsZero() && o.ScaleTarget == "" {
		return nil // a Namespace
	}
	b := []byte{bit(o.compat, bitCompat) | bit(o.Unselected, bitUnselected) | bit(o.Owned, bitOwned) | bit(o.Unreadable, bitUnreadable)}
	b = binary.AppendUvarint(b, uint64(o.Number))
	b = binary.AppendUvarint(b, uint64(o.Max))
	b = binary.AppendUvarint(b, uint64(max(o.Created.Unix(), 0)))
	b = appendText(b, o.ScaleTarget)
	for k := range keyCount {
		if o.has(k) {
			b = appendText(append(b, byte(k)), o.text[k])
		}
	}
	return b
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// Decode returns what Encode has encoded.
func Decode(digest []byte) (object Object) {
	if len(digest) == 0 {
		return object
	}
	text := func() string {
		size, n := binary.Uvarint(digest)
		part := digest[n : n+int(size)]
		digest = digest[n+int(size):]
		return string(part)
	}
	uvarint := func() int64 {
		value, n := binary.Uvarint(digest)
		digest = digest[n:]
		return int64(value)
	}
	flags := digest[0]
	digest = digest[1:]
	object.compat, object.Unselected, object.Owned, object.Unreadable = flags&bitCompat != 0, flags&bitUnselected != 0, flags&bitOwned != 0, flags&bitUnreadable != 0
	object.Number, object.Max = uvarint(), uvarint()
	object.Created = time.Unix(uvarint(), 0)
	object.ScaleTarget = text()
	for len(digest) > 0 {
		k := Key(digest[0])
		digest = digest[1:]
		object.put(k, text())
	}
	return object
}

// HasRecord reports whether the object has a record.
func (o *Object) HasRecord() bool { return o.has(Record, OtherRecord) }

// LostRecord returns the workload's record if the next state has the same number but no record, otherwise 0.
func (o *Object) LostRecord(next *Object, kind Kind) int64 {
	if !o.HasRecord() || next.HasRecord() || o.Number != next.Number {
		return 0
	}
	lost, err := o.record(kind)
	if err != nil {
		return 0
	}
	return lost
}

// record returns what to return to. Of two records, the larger counts.
func (o *Object) record(kind Kind) (largest int64, err error) {
	for _, k := range []Key{Record, OtherRecord} {
		if !o.has(k) {
			continue
		}
		n, err := strconv.ParseInt(o.text[k], 10, 64)
		switch {
		case kind == CronJob:
			n = 1 // the originals do not document the value of their record
		case kind == ScaledObject && n == -1:
			n = Unpaused
		case err != nil || n < 0 || n > math.MaxInt32:
			return 0, fmt.Errorf("%q is not a number of replicas", truncate(o.text[k]))
		}
		largest = max(largest, n)
	}
	return largest, nil
}

// truncate shortens a text, which a tenant may have written, so that it fits into an Event.
func truncate(text string) string {
	const limit = 60
	switch {
	case text == tooLong:
		return "…"
	case len(text) > limit:
		return strings.ToValidUTF8(text[:limit], "") + "…"
	}
	return text
}
