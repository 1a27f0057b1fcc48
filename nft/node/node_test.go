package node

import (
	"os"
	"testing"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft/nfttest"
)

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// dialIn opens sockets in a namespace.
func dialIn(ns *nfttest.NS) Dialer {
	return func(groups uint32) (nl *netlink.Conn, err error) {
		err = ns.Do(func() error {
			nl, err = Dial(groups)
			return err
		})
		return nl, err
	}
}
