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
	Hash  string    `json:"hash"` // of the policy
	Since time.Time `json:"since"`
	// Earlier remembers those that contradicted the policy when it came into force; nil: not known.
	Earlier *Noted `json:"earlier"`
}

// Age returns when an entry that contradicts the policy began.
func (h History) Age(e *Entry) Age {
	if h.Earlier == nil {
		return h.byTime(e, AgeUndated)
	}
	if age, noted := h.Earlier.age(e); noted {
		return age
	}
	if h.Earlier.Full {
		return h.byTime(e, AgeUndated)
	}
	return h.byTime(e, AgeOverruled)
}

// byTime returns when an entry began by its time, or else another age.
func (h History) byTime(e *Entry, otherwise Age) Age {
	switch {
	case e.Started.IsZero() || h.Since.IsZero():
		return otherwise
	case e.Started.Before(h.Since):
		return AgeStale
	}
	return AgeOverruled
}

// maxNoted bounds the memory of noted connections: twenty bytes for each.
const maxNoted = 1 << 16

// Noted are connections that are remembered by a hash of their addresses, ports and ID.
type Noted struct {
	// Undated has each of them, and whether it is not known when it began; otherwise it is stale.
	Undated map[uint64]bool `json:"undated"`
	// Full says that there were more than are remembered.
	Full bool `json:"full"`

	limit int
}

func newNoted(limit int) *Noted { return &Noted{Undated: map[uint64]bool{}, limit: limit} }

// hash returns the hash by which a connection is remembered, the same in each process.
func (k Key) hash() uint64 {
	h := fnv.New64a()
	_ = binary.Write(h, binary.BigEndian, k.ID)
	for _, t := range []Tuple{k.Original, k.Reply} {
		_, _ = h.Write([]byte{t.Protocol})
		for _, a := range []netip.AddrPort{t.Src, t.Dst} {
			b, _ := a.MarshalBinary()
			_, _ = h.Write(b)
		}
	}
	return h.Sum64()
}

func (n *Noted) age(e *Entry) (age Age, noted bool) {
	undated, noted := n.Undated[e.hash()]
	if undated {
		return AgeUndated, noted
	}
	return AgeStale, noted
}

func (n *Noted) add(e *Entry, age Age) {
	if len(n.Undated) < n.limit {
		n.Undated[e.hash()] = age == AgeUndated
		return
	}
	n.Full = true
}

// Len returns how many connections are remembered, none if nothing is known.
func (n *Noted) Len() int {
	if n == nil {
		return 0
	}
	return len(n.Undated)
}

// A Past is what was known and in force before a policy.
type Past struct {
	Before *Comparison // nil: it is not known what was in force
	// History is that of the policy before.
	History History
	// Missing says that rules were missing for some time before the policy came into force.
	Missing bool
}

// age returns when an entry began that contradicts a policy which has just come into force.
func (p Past) age(e *Entry) Age {
	if p.Before == nil {
		return AgeUndated
	}
	ruling, right := p.Before.opinion(e)
	if right {
		return AgeStale
	}
	age := p.History.Age(e)
	switch {
	case age != AgeOverruled:
		return age
	case p.Missing:
		return AgeStale
	case ruling.Depends: // the policy before may have decided
		return AgeUndated
	}
	return age
}

// Note remembers the connections that contradict a policy which has just come into force: they are
// stale if the policy before agrees with them, and otherwise what they were. It ends with the context.
func (t *Tracker) Note(ctx context.Context, c *Comparison, earlier Past) (*Noted, error) {
	var n *Noted
	s, err := t.dumpSample(ctx, func() { n = newNoted(t.noted) }, func(e *Entry) {
		if _, found := c.Compare(e); found != Contradicts {
			return
		}
		if age := earlier.age(e); age != AgeOverruled {
			n.add(e, age)
		}
	})
	if err != nil {
		return nil, err
	}
	n.Full = n.Full || s.Partial
	return n, nil
}
