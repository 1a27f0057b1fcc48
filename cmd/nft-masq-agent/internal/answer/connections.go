package answer

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"text/tabwriter"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
)

// A Connection is a tracked connection. As JSON, fields are only ever added.
type Connection struct {
	Protocol    string      `json:"protocol"`
	Source      string      `json:"source"`              // the pod's address and port
	Destination string      `json:"destination"`         // after DNAT
	Requested   string      `json:"requested,omitempty"` // before DNAT, such as that of a Service, if different
	SeenAs      string      `json:"seenAs"`              // the source that the destination sees
	State       string      `json:"state,omitempty"`     // of TCP and SCTP
	Timeout     uint32      `json:"timeoutSeconds"`      // until it expires
	Zone        uint16      `json:"zone,omitempty"`      // connection-tracking zone
	Now         nft.Verdict `json:"now,omitempty"`       // for a new connection; none: no rules of ours, or it depends on the interfaces
	Stale       bool        `json:"stale"`               // the translation contradicts that
}

// NewConnection returns an entry for output. The judge is nil if there is no policy.
func NewConnection(e *conntrack.Entry, j *conntrack.Judge) Connection {
	c := Connection{
		Protocol: conntrack.ProtocolName(e.Original.Protocol), Source: end(e.Original.Src),
		Destination: end(e.Destination()), SeenAs: end(e.SeenAs()),
		State: e.State, Timeout: e.Timeout, Zone: e.Zone,
	}
	if e.Original.Dst != e.Destination() {
		c.Requested = end(e.Original.Dst)
	}
	if j != nil {
		c.Now, c.Stale = j.Now(e), j.Stale(e)
	}
	return c
}

// end returns an address without the port if the protocol has none.
func end(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}

// Connections returns the list as text.
func Connections(all []Connection) string {
	return table("PROTO\tSOURCE\tDESTINATION\tSEEN AS\tSTATE\tTIMEOUT\tNOW", all, func(c Connection) string {
		destination, now := c.Destination, string(c.Now)
		if c.Requested != "" {
			destination = c.Requested + " → " + c.Destination
		}
		if c.Stale {
			now += " (stale)"
		}
		return fmt.Sprintf("%s\t%s\t%s\t%s\t%s\t%ds\t%s", c.Protocol, c.Source, destination, c.SeenAs, cmp.Or(c.State, "-"),
			c.Timeout, now)
	})
}

// table aligns the columns of a list, which tabs separate.
func table[T any](header string, all []T, row func(T) string) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(w, header)
	for _, v := range all {
		_, _ = fmt.Fprintln(w, row(v))
	}
	_ = w.Flush()
	return b.String()
}

// PortsOf is how many ports of a source address the connections to one
// destination use.
type PortsOf struct {
	Protocol    string    `json:"protocol"`
	SeenAs      string    `json:"seenAs"`
	Destination string    `json:"destination"`
	Used        int       `json:"used"`
	Ports       int       `json:"ports"` // available
	Pods        []PodUses `json:"pods"`  // sorted by number of ports
}

// PodUses is how many of them a pod uses.
type PodUses struct {
	Pod  string `json:"pod"`
	Used int    `json:"used"`
}

// TopPods returns the pods that use the most ports, at most a number of them.
func TopPods(uses map[netip.Addr]int, most int) []PodUses {
	pods := []PodUses{}
	for pod, n := range uses {
		pods = append(pods, PodUses{pod.String(), n})
	}
	slices.SortFunc(pods, func(a, b PodUses) int { return cmp.Or(cmp.Compare(b.Used, a.Used), cmp.Compare(a.Pod, b.Pod)) })
	return pods[:min(most, len(pods))]
}

// Ports returns the list as text.
func Ports(all []PortsOf) string {
	return table("PROTO\tSEEN AS\tDESTINATION\tPORTS USED\tPODS", all, func(p PortsOf) string {
		var pods []string
		for _, u := range p.Pods {
			pods = append(pods, fmt.Sprintf("%s (%d)", u.Pod, u.Used))
		}
		return fmt.Sprintf("%s\t%s\t%s\t%d of %d, %.1f %%\t%s",
			p.Protocol, p.SeenAs, p.Destination, p.Used, p.Ports, 100*float64(p.Used)/float64(p.Ports), strings.Join(pods, ", "))
	})
}
