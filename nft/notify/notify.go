// Package notify receives the kernel's notifications about nf_tables: one [Change] for each
// transaction. The daemon does not listen; the command monitor does.
package notify

import (
	"errors"
	"fmt"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfnetlink"
)

// A Listener is notified of each transaction in the network namespace in which it
// was opened.
//
// While it is open, the kernel creates a notification for every rule and element
// of every transaction, in all network namespaces. This multiplies the time and
// memory of large transactions.
type Listener struct{ nl *netlink.Conn }

// A Change is one transaction.
type Change struct {
	nfnetlink.Generation
	// Chains are the chains of which something changed, in the order of the changes, and
	// with an empty name the tables of which something else did.
	Chains []nfnetlink.ChainID
	// Messages is the number of objects that changed: rules, chains, elements of sets, …
	Messages int
	// Lost means that notifications were lost: anything may have changed.
	Lost bool
}

// Listen opens a listener. It needs CAP_NET_ADMIN.
func Listen() (*Listener, error) {
	nl, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{MessageBufferSize: nfnetlink.PageSize})
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	err = errors.Join(nl.SetReadBuffer(listenBuffer), nl.JoinGroup(unix.NFNLGRP_NFTABLES))
	if err != nil {
		_ = nl.Close()
		return nil, fmt.Errorf("listen for changes of the ruleset: %w", err)
	}
	return &Listener{nl}, nil
}

// listenBuffer fits the notifications of some 10,000 elements of sets.
const listenBuffer = 4 << 20

// Receive waits for the next change. After an error there are no further changes.
func (l *Listener) Receive() (c Change, err error) {
	for {
		msgs, err := l.nl.Receive()
		if errors.Is(err, unix.ENOBUFS) {
			return Change{Lost: true}, nil
		}
		if err != nil {
			return Change{}, fmt.Errorf("listen for changes of the ruleset: %w", err)
		}
		for _, m := range msgs {
			if g, ok := nfnetlink.ParseGeneration(m); ok { // the last one of a transaction, in a datagram of its own
				c.Generation = g
				return c, nil
			}
			c.add(m)
		}
	}
}

// add adds what a notification is about. The first attribute of every kind is the table.
func (c *Change) add(m netlink.Message) {
	c.Messages++
	if len(m.Data) < 4 {
		return
	}
	a := nfnetlink.Attrs(m.Data[4:])
	of := nfnetlink.ChainID{Family: nfnetlink.Family(m.Data[0]), Table: a.Str(unix.NFTA_CHAIN_TABLE)}
	switch uint16(m.Header.Type & 0xff) {
	case unix.NFT_MSG_NEWCHAIN, unix.NFT_MSG_DELCHAIN:
		of.Name = a.Str(unix.NFTA_CHAIN_NAME)
	case unix.NFT_MSG_NEWRULE, unix.NFT_MSG_DELRULE:
		of.Name = a.Str(unix.NFTA_RULE_CHAIN)
	}
	if !slices.Contains(c.Chains, of) {
		c.Chains = append(c.Chains, of)
	}
}

// Close ends the listener; a waiting Receive returns.
func (l *Listener) Close() error { return l.nl.Close() }
