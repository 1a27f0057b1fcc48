package nfnetlink

// PortID returns the netlink port of the socket, or 0 if there is none. It does not wait for
// a request.
func (c *Conn) PortID() uint32 {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nl == nil {
		return 0
	}
	return c.nl.PID()
}
