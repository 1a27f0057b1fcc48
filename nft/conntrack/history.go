package conntrack

import (
	"context"
	"hash/maphash"
	"time"
)

// A History tells since when a policy is in force, and which connections contradicted it then. The
// zero History knows nothing.
type History struct {
	Since time.Time
	// Earlier remembers those that contradicted the policy when it came into force; nil: not known.
	Earlier *Noted
}

// age returns when an entry that contradicts the policy began.
func (h History) age(e *Entry) Age {
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

// Noted are connections that are remembered by a hash of their addresses, ports and ID, and whether it
// is not known when they began; otherwise they are stale.
type Noted struct {
	seed    maphash.Seed
	undated map[uint64]bool
	limit   int
	// Full says that there were more than are remembered.
	Full bool
}

func newNoted(limit int) *Noted {
	return &Noted{seed: maphash.MakeSeed(), undated: map[uint64]bool{}, limit: limit}
}

func (n *Noted) hash(e *Entry) uint64 { return maphash.Comparable(n.seed, e.Key) }

func (n *Noted) age(e *Entry) (age Age, noted bool) {
	undated, noted := n.undated[n.hash(e)]
	if undated {
		return AgeUndated, noted
	}
	return AgeStale, noted
}

func (n *Noted) add(e *Entry, age Age) {
	if len(n.undated) < n.limit {
		n.undated[n.hash(e)] = age == AgeUndated
		return
	}
	n.Full = true
}

func (n *Noted) drop(e *Entry) { delete(n.undated, n.hash(e)) }

// Len returns how many connections are remembered, none if nothing is known.
func (n *Noted) Len() int {
	if n == nil {
		return 0
	}
	return len(n.undated)
}

// A Past is what was known and in force before a policy.
type Past struct {
	// Policies were in force since the history was noted.
	Policies []*Comparison
	// History is that of the first of them.
	History History
	// Missing says that rules were missing for some time before the policy came into force.
	Missing bool
}

// age returns when an entry began that contradicts a policy which has just come into force.
func (p Past) age(e *Entry) Age {
	for _, c := range p.Policies {
		if c.agrees(e) {
			return AgeStale
		}
	}
	age := p.History.age(e)
	if age == AgeOverruled && p.Missing {
		return AgeStale
	}
	return age
}

// Note remembers the connections that contradict a policy which has just come into force: they are
// stale if one of the past agrees with them, and otherwise what they were. It ends with the context.
func (t *Tracker) Note(ctx context.Context, c *Comparison, past Past) (*Noted, error) {
	var n *Noted
	s, err := t.each(ctx, func() { n = newNoted(t.noted) }, func(e *Entry) {
		if _, found := c.Compare(e); found != Contradicts {
			return
		}
		if age := past.age(e); age != AgeOverruled {
			n.add(e, age)
		}
	})
	if err != nil {
		return nil, err
	}
	n.Full = n.Full || s.Partial
	return n, nil
}
