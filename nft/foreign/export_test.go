package foreign

// TraceAt follows a packet through the base chains of some hooks.
func (t *Tracer) TraceAt(p Packet, hooks ...uint32) Trace {
	t.start(p)
	t.pass(hooks...)
	t.addWritten()
	return t.out
}
