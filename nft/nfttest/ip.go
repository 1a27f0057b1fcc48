package nfttest

import (
	"fmt"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest/netns"
)

// NewNode returns a namespace in which ip has run commands.
func NewNode(t *testing.T, commands ...string) *NS {
	t.Helper()
	ns := NewNS(t, "node")
	IP(t, ns, commands...)
	return ns
}

// IP runs ip commands in a namespace, one per line; those that begin with -6 for IPv6.
func IP(t *testing.T, ns *NS, commands ...string) {
	t.Helper()
	batch, flag := "", "-d"
	run := func() {
		if batch != "" {
			Run(t, ns, batch, "ip", flag, "-batch", "-")
		}
		batch = ""
	}
	for line := range strings.Lines(strings.Join(commands, "\n") + "\n") {
		rest, v6 := strings.CutPrefix(line, "-6 ")
		if of := map[bool]string{true: "-6", false: "-d"}[v6]; of != flag {
			run()
			flag = of
		}
		batch += rest
	}
	run()
}

// Bridge connects the pod as bridge CNI plugins do it: its link becomes a port of cni0, which has the node's addresses
// for pods.
func (t *Topology) Bridge(tb *testing.T) {
	tb.Helper()
	IP(tb, t.Node, `link add cni0 address 02:00:00:00:01:01 type bridge
link set pod0 address 02:00:00:00:01:09
address flush dev pod0
link set cni0 up
link set pod0 master cni0
link set pod0 type bridge_slave hairpin on
address add 10.244.1.1/32 dev cni0
address add fd00:10:244:1::1/128 dev cni0 nodad
route replace 10.244.1.2/32 dev cni0
route del fd00:10:244:1::2/128 dev pod0
route add fd00:10:244:1::2/128 dev cni0
neighbor replace 10.244.1.2 lladdr 02:00:00:00:01:02 dev cni0
neighbor replace fd00:10:244:1::2 lladdr 02:00:00:00:01:02 dev cni0`)
	NoError(tb, t.Node.AwaitCarrier("cni0"))
}

// In calls a function in a namespace.
func In[T any](t *testing.T, ns *NS, fn func() (T, error)) T {
	t.Helper()
	out, err := netns.In(ns, fn)
	NoError(t, err)
	return out
}

// Links returns commands of ip that create interfaces that are up, whose other ends are up too.
func Links(names ...string) (commands string) {
	for _, name := range names {
		commands += fmt.Sprintf("link add %[1]s type veth peer name peer-%[1]s\n", name)
		commands += fmt.Sprintf("link set peer-%[1]s up\nlink set %[1]s up\n", name)
	}
	return commands
}
