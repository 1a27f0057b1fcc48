package conntrack

import (
	"context"
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"time"
)

// A History tells since when a policy is in force, and which connections contradicted it then. The
// zero History knows nothing. As JSON, an agent passes it to commands.
type History struct {
	Hash  string // of the policy
	Since time.Time
	// AtStart says that the policy is the first one of the agent, which may have been in force before.
	AtStart bool
	// Earlier has the hashes of the connections that contradicted the policy when it came into force; nil: not known.
	Earlier map[uint64]bool
	// Incomplete says that there were more than Earlier has.
	Incomplete bool
	// Recent are the last counts of entries that had overruled connections within the last ten minutes.
	Recent []Count
}

// Age returns when an entry that contradicts the policy began.
func (h History) Age(e *Entry) Age {
	dated := !e.Started.IsZero() && !h.Since.IsZero()
	switch {
	case dated && !e.Started.Before(h.Since):
		return AgeOverruled
	case dated && h.AtStart, h.Earlier == nil && !dated:
		return AgeUndated
	case dated:
		return AgeStale
	case h.Earlier[e.hash()] && h.AtStart:
		return AgeUndated
	case h.Earlier[e.hash()]:
		return AgeStale
	case h.Incomplete:
		return AgeUndated
	}
	return AgeOverruled
}

// maxNoted bounds the memory of noted connections: twenty bytes for each.
const maxNoted = 1 << 16

// hash returns the hash by which a connection is noted, the same in each process.
func (k Key) hash() uint64 {
	b := make([]byte, 0, 128)
	b = binary.BigEndian.AppendUint32(b, k.ID)
	b = append(b, k.Original.Protocol)
	for _, a := range []netip.AddrPort{k.Original.Src, k.Original.Dst, k.Reply.Src, k.Reply.Dst} {
		b, _ = a.AppendBinary(b) // it cannot fail
	}
	h := fnv.New64a()
	_, _ = h.Write(b)
	return h.Sum64()
}

// Note returns the hashes of the connections that contradict a policy which has just come into force, and whether
// there are more. It ends with the context.
func (t *Tracker) Note(ctx context.Context, c *Comparison) (earlier map[uint64]bool, full bool, err error) {
	begin := func() {
		earlier = map[uint64]bool{}
		full = false
	}
	s, err := t.dumpSample(ctx, begin, func(e *Entry) {
		_, found := c.Compare(e)
		switch {
		case found != Contradicts:
		case len(earlier) < t.noted:
			earlier[e.hash()] = true
		default:
			full = true
		}
	})
	if err != nil {
		return nil, false, err
	}
	return earlier, full || s.Partial, nil
}
