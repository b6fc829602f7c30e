// Copyright The Quartermaster Authors.
// SPDX-License-Identifier: Apache-2.0

package informers

// What the cache remembers of the states that an object had. Only config-reload needs it. It is here since an
// Object has it in 8 bytes, which makes 1.5 MiB for 200,000 Secrets; a map of config-reload's own would take
// 10 MiB, a tenth of what the manager takes then.

// preexisting is set in Object.first if the object was there before this cache.
const preexisting = 1 << 63

// inherit takes over the history of the state before, nil for a new object. created says that a watch
// saw the object come.
func (o *Object) inherit(before *Object, created bool) {
	if before == nil || before.uid != o.uid || o.uid == [16]byte{} && before.GetUID() != o.GetUID() {
		o.first = o.version
		if !created {
			o.first |= preexisting
		}
		return
	}
	first, changed := before.first, before.changed()
	rest, restBefore := o.packed, before.packed
	for i := range o.plan.digests {
		var sum, sumBefore string
		sum, rest = cutPart(rest)
		sumBefore, restBefore = cutPart(restBefore)
		switch {
		case !o.plan.digests[i].history || sum == sumBefore:
		case sum == "" || sumBefore == "": // nobody has seen what changed before
			first, changed = first|preexisting, 0
		default:
			changed = o.version
		}
	}
	o.first = first
	if changed != 0 {
		if o.extra == nil {
			o.extra = &extra{Object: emptyMeta}
		}
		o.extra.changed = changed
	}
}

func (o *Object) changed() uint64 {
	if o.extra == nil {
		return 0
	}
	return o.extra.changed
}

// FirstVersion returns the resourceVersion with which this cache first saw the object; empty if
// that is not known.
func (o *Object) FirstVersion() string { return formatVersion(o.first &^ preexisting) }

// CreatedVersion returns FirstVersion if the object was created then; empty if it was there before, or if
// that is not known since the need has a selector.
func (o *Object) CreatedVersion() string {
	if o.first&preexisting != 0 {
		return ""
	}
	return formatVersion(o.first)
}

// ChangedVersion returns the resourceVersion with which the digest with a history was last seen to
// change; empty if it was not. A digest that comes or goes is no change. After a list that replaced a
// broken watch, the change itself may have been earlier.
func (o *Object) ChangedVersion() string { return formatVersion(o.changed()) }
