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
