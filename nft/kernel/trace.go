package kernel

import (
	"io"
	"net"

	"nft-masq-agent/nft/nfnetlink"
)

// TraceTable is the table, of family inet, that a trace of packets has for some seconds. It is no
// part of the rules that are compared.
const TraceTable = "nft-masq-agent-trace"

// traceName is how [Kernel.Cleanup] names it.
const traceName = "table inet " + TraceTable

// LockTrace makes this process the only one that traces in its network namespace, until the lock is closed or the
// process ends. It fails while another process traces.
func LockTrace() (io.Closer, error) { return net.Listen("unix", "@"+TraceTable) }

// RemoveTrace deletes the table that a killed trace left, and reports whether there was one.
func RemoveTrace(c *nfnetlink.Conn) (removed bool, err error) {
	found, err := abandonedTrace(c)
	if err != nil || !found {
		return false, err
	}
	lock, err := LockTrace()
	if err != nil {
		return false, nil // the trace still runs
	}
	defer func() { _ = lock.Close() }()
	b := &nfnetlink.Batch{}
	b.DelTable(nfnetlink.Inet, TraceTable)
	if err := c.Commit(b); err != nil {
		return false, err
	}
	return true, nil
}

// abandonedTrace reports whether there is a table of a trace: abandoned, unless a trace still runs.
func abandonedTrace(c *nfnetlink.Conn) (bool, error) {
	_, err := c.Table(nfnetlink.Inet, TraceTable)
	if nfnetlink.IsNotExist(err) {
		return false, nil
	}
	return err == nil, err
}
