package node

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// newNode returns a namespace in which ip has run commands.
func newNode(t *testing.T, commands ...string) *nfttest.NS {
	t.Helper()
	ns := nfttest.NewNS(t, "node")
	ip(t, ns, commands...)
	return ns
}

// ip runs ip commands in a namespace, one per line; those that begin with -6 for IPv6.
func ip(t *testing.T, ns *nfttest.NS, commands ...string) {
	t.Helper()
	batch, flag := "", "-d"
	run := func() {
		if batch != "" {
			nfttest.Run(t, ns, batch, "ip", flag, "-batch", "-")
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

// in calls a function of this package in a namespace.
func in[T any](t *testing.T, ns *nfttest.NS, fn func() (T, error)) (out T) {
	t.Helper()
	err := ns.Do(func() (err error) {
		out, err = fn()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// dialIn opens sockets in a namespace.
func dialIn(ns *nfttest.NS) dialer {
	return func(groups uint32) (nl *netlink.Conn, err error) {
		err = ns.Do(func() error {
			nl, err = dial(groups)
			return err
		})
		return nl, err
	}
}

// links creates interfaces that are up, whose other ends are up too.
func links(names ...string) (commands string) {
	for _, name := range names {
		commands += fmt.Sprintf("link add %[1]s type veth peer name peer-%[1]s\n", name)
		commands += fmt.Sprintf("link set peer-%[1]s up\nlink set %[1]s up\n", name)
	}
	return commands
}
