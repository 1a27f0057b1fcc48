package conntrack

import (
	"context"
	"time"
)

// A History tells since when a policy is in force, and which connections contradicted it then. The
// zero History knows nothing. As JSON, an agent passes it to commands.
type History struct {
	Hash  string // of the policy
	Since time.Time
	// AtStart says that the policy is the first one of the agent, which may have been in force before.
	AtStart bool
	// Earlier has the IDs of the connections that contradicted the policy when it came into force; nil: not known.
	Earlier map[uint32]bool
	// Incomplete says that there were more than Earlier has.
	Incomplete bool
	// Recent are the last counts of entries that had overruled connections within the last ten minutes.
	Recent []Count
}

// Age returns when an entry that contradicts the policy began. It is "" for one that is closed and did not certainly
// begin under the policy: that is no evidence.
func (h History) Age(e *Entry) Age {
	earlier := h.Earlier[e.ID]
	known := h.Earlier != nil && (earlier || !h.Incomplete)
	if !e.Started.IsZero() && !h.Since.IsZero() {
		earlier = e.Started.Before(h.Since)
		known = true
	}
	switch {
	case known && !earlier:
		return AgeOverruled
	case !e.Open():
		return ""
	case !known || h.AtStart:
		return AgeUndated
	}
	return AgeStale
}

// maxNoted bounds the memory of noted connections: some ten bytes for each.
const maxNoted = 1 << 16

// Note returns the IDs of the connections that contradict a policy which has just come into force, and whether
// there are more. It ends with the context.
func (t *Tracker) Note(ctx context.Context, c *Comparison) (earlier map[uint32]bool, full bool, err error) {
	begin := func() {
		earlier = map[uint32]bool{}
		full = false
	}
	s, err := t.dumpSample(ctx, begin, func(e *Entry) {
		_, found := c.Compare(e)
		switch {
		case found != Contradicts:
		case len(earlier) < t.noteLimit:
			earlier[e.ID] = true
		default:
			full = true
		}
	})
	if err != nil {
		return nil, false, err
	}
	return earlier, full || s.Partial, nil
}
