package foreign

import (
	"context"

	"nft-masq-agent/nft/nfnetlink"
)

// TraceAt follows a packet through the base chains of some hooks.
func (t *Tracer) TraceAt(p Packet, hooks ...uint32) Trace {
	t.start(p)
	t.pass(hooks...)
	t.addWritten()
	return t.out
}

// Near are the bounds of what is read, less so much.
type Near struct{ Rules, Memory, Elements int }

// TracerNear reads the chains of all hooks when only so much may be read.
func TracerNear(ctx context.Context, c *nfnetlink.Conn, left Near) (*Tracer, error) {
	s, err := read(reader{
		ctx: ctx, conn: c, tracing: true,
		own: func(nfnetlink.Chain) bool { return false }, reads: func(nfnetlink.Chain) bool { return true },
		rules: maxRules - left.Rules, memory: maxMemory - left.Memory, elements: maxElements - left.Elements,
	})
	t := &Tracer{walker: newWalker(s, Packet{})}
	t.conn, t.visit = c, t.see
	return t, err
}

// Content returns how many chains, sets and maps were read.
func (s Snapshot) Content() (chains, sets, maps int) {
	for _, c := range s.Chains {
		if !c.Unread {
			chains++
		}
	}
	return chains, len(s.sets), len(s.maps)
}
