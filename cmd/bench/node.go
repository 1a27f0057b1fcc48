package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/mdlayher/netlink"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/modes"
	"nft-masq-agent/nft/nfttest/netns"
)

// A node is a network namespace with only our rules.
type node struct {
	ns   *nfttest.NS
	conn *nfnetlink.Conn
}

func openNode(name string) (*node, error) {
	ns, err := netns.Open(name)
	if err != nil {
		return nil, fmt.Errorf("%w (this program needs root)", err)
	}
	return &node{ns: ns, conn: dialIn(ns)}, nil
}

// dialIn returns a connection to nf_tables in a namespace, for use by any thread.
func dialIn(ns *nfttest.NS) *nfnetlink.Conn {
	return nfnetlink.New(func() (*netlink.Conn, error) { return nfttest.DialNetfilter(ns) })
}

func (n *node) close() error { return errors.Join(n.conn.Close(), n.ns.Close()) }

// otherTable is as long as our name, so that recorded messages fit it.
const otherTable = "another-writer"

// clear deletes what was measured: the table with that name, and that of
// iptables.
func (n *node) clear(table string, size int) error {
	var b nfnetlink.Batch
	for _, f := range []nfnetlink.Family{nfnetlink.Inet, nfnetlink.IPv4} {
		tables, err := n.conn.Tables(f)
		if err != nil {
			return err
		}
		for _, t := range tables {
			if t.Name == table || t.Family == nfnetlink.IPv4 {
				b.DelTable(t.Family, t.Name)
			}
		}
	}
	if err := n.conn.Commit(&b); err != nil {
		return fmt.Errorf("delete tables: %w", err)
	}
	n.settle(size)
	return nil
}

// settle waits until the kernel, which frees deleted objects asynchronously,
// should be done with a set of that size.
func (n *node) settle(size int) {
	time.Sleep(20*time.Millisecond + time.Duration(size)*2*time.Microsecond)
}

// effective reports whether the rules with this hash are in the kernel.
func (n *node) effective(hash string) (bool, error) {
	rules, err := modes.Rules(n.conn, nfnetlink.Inet, nft.TableName, "postrouting")
	if err != nil && !nfnetlink.IsNotExist(err) {
		return false, err
	}
	return len(rules) > 0 && rules[len(rules)-1].Comment() == "config "+hash, nil
}

// await polls until the rules with this hash are effective. It does not listen,
// because a listener slows down transactions.
func (n *node) await(hash string, every time.Duration) error {
	const applyTimeout = time.Minute
	for end := time.Now().Add(applyTimeout); time.Now().Before(end); time.Sleep(every) {
		if is, err := n.effective(hash); is || err != nil {
			return err
		}
	}
	return fmt.Errorf("the rules %s were not applied within %s", hash, applyTimeout)
}

// runProgram runs a program in a namespace until it exits.
func runProgram(ns *nfttest.NS, stdin io.Reader, name string, args ...string) (time.Duration, error) {
	cmd := nfttest.Command(name, args...)
	var output bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, &output, &output
	start := time.Now()
	if err := ns.Do(cmd.Start); err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	err := cmd.Wait()
	took := time.Since(start)
	if err != nil {
		return 0, fmt.Errorf("%s: %w\n%s", name, err, &output)
	}
	return took, nil
}
