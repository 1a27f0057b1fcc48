package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// Connections is the output of connections.
type Connections struct {
	cli.Head
	// Config of the files.
	Config Config `json:"config"`
	// Connections that were asked for.
	Connections []Connection `json:"connections,omitempty"`
	// Total is how many connections match. It is larger than the list if that is limited.
	Total int `json:"total"`
	// Deleted counts the connections that --flush has deleted.
	Deleted int `json:"deleted,omitempty"`
	// Block of ports that the port of --seen-as is in, with portsPerPod.
	Block *PortBlock `json:"portBlock,omitempty"`

	behind string // the first line of the text
}

// A Connection is a tracked connection.
type Connection struct {
	// Protocol of the connection.
	Protocol string `json:"protocol"`
	// Source is the pod's address and port.
	Source string `json:"source"`
	// Destination after DNAT.
	Destination string `json:"destination"`
	// Requested is the destination before DNAT, such as that of a Service, if it differs.
	Requested string `json:"requested,omitempty"`
	// SeenAs is the source that the destination sees.
	SeenAs string `json:"seenAs"`
	// State of TCP and SCTP.
	State string `json:"state,omitempty"`
	// Timeout until the entry expires.
	Timeout uint32 `json:"timeoutSeconds"`
	// Zone of connection tracking.
	Zone uint16 `json:"zone,omitempty"`
	// Verdict is that about a new connection; absent without rules of this agent, if it depends on the interfaces, or
	// if the policy is not asked: in a zone, of the node, to itself, bridged, multicast.
	Verdict nft.Verdict `json:"verdict,omitempty"`
	// Stale means that the translation contradicts that, and that the connection did not certainly begin under the
	// policy.
	Stale bool `json:"stale"`
	// Overruled means that the translation contradicts that although the connection began under the policy: another
	// program decided.
	Overruled bool `json:"overruled,omitempty"`
}

// NewConnection returns an entry for output, without a verdict.
func NewConnection(e *conntrack.Entry) Connection {
	c := Connection{
		Protocol: conntrack.ProtocolName(e.Original.Protocol), Source: conntrack.HostPort(e.Original.Src),
		Destination: conntrack.HostPort(e.Destination()), SeenAs: conntrack.HostPort(e.SeenAs()),
		State: e.State, Timeout: e.Timeout, Zone: e.Zone,
	}
	if e.Original.Dst != e.Destination() {
		c.Requested = conntrack.HostPort(e.Original.Dst)
	}
	return c
}

// JudgedConnection returns an entry with the verdict of a policy.
func JudgedConnection(e *conntrack.Entry, policy *conntrack.Comparison, history conntrack.History) Connection {
	ruling, finding := policy.Compare(e)
	if finding == conntrack.Contradicts {
		return exampleConnection(conntrack.Example{Entry: *e, Verdict: ruling.Verdict, Age: history.Age(e)})
	}
	c := NewConnection(e)
	if finding != conntrack.OnInterface {
		c.Verdict = ruling.Verdict
	}
	return c
}

// exampleConnection returns a connection that contradicts the policy.
func exampleConnection(x conntrack.Example) Connection {
	c := NewConnection(&x.Entry)
	c.Verdict = x.Verdict
	c.Overruled = x.Age == conntrack.AgeOverruled
	c.Stale = !c.Overruled && x.Age != ""
	return c
}

// Behind sets the first line of the text: the sources of the connections, which are sorted by them.
func (c *Connections) Behind(seenAs netip.AddrPort, found []conntrack.Entry) {
	var sources []netip.Addr
	for i := range found {
		sources = append(sources, found[i].Original.Src.Addr())
	}
	c.behind = fmt.Sprintf("behind %s: %s", conntrack.HostPort(seenAs), listed(cli.Texts(slices.Compact(sources))))
}

// Print writes the answer as text: errors first, and notes last.
func (c *Connections) Print(t cli.Text) {
	t.Problems(c.Errors)
	if c.behind != "" {
		t.Line("%s", c.behind)
	}
	if c.Block != nil {
		t.Line("%s", c.Block)
	}
	if c.Total > 0 {
		cli.Table(t, "PROTO\tSOURCE\tDESTINATION\tSEEN AS\tSTATE\tTIMEOUT\tNOW", c.Connections)
	} else if c.Block == nil && len(c.Errors) == 0 {
		t.Line("no connections")
	}
	cli.Lines(t, "", c.Notes)
}

// String returns the columns of a table.
func (c Connection) String() string {
	destination := c.Destination
	if c.Requested != "" {
		destination = c.Requested + " → " + c.Destination
	}
	verdict := string(c.Verdict)
	if c.Stale {
		verdict += " (stale)"
	}
	if c.Overruled {
		verdict += " (overruled)"
	}
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%ds\t%s", c.Protocol, c.Source, destination, c.SeenAs, cmp.Or(c.State, "-"),
		c.Timeout, verdict)
}
