package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const groupInvalid = "what dropInvalid costs an open connection"

// emptyHook is the least that a chain can cost.
const emptyHook = `table inet empty {
	chain untranslated {
		type filter hook postrouting priority srcnat + 20; policy accept
	}
	}`

// invalid measures packets of connections that are open, which the chain that drops others
// lets pass: small datagrams one by one, and as much as goes through one TCP connection.
// The rules take turns on one node, because two nodes differ by more than they do.
func (b *bench) invalid(ctx context.Context) {
	c := config.Default(config.Defaults{})
	c.MasqueradeSrcCIDRs = []config.CIDR{{Prefix: netip.MustParsePrefix("10.244.0.0/16")}}
	options := nft.Options{Layout: ruleset(nil, nft.ModeNFTables).Layout, RandomFully: true}
	without := nft.Compile(c, options).String()
	c.DropInvalid = true
	texts := []string{nft.Compile(c, options).String(), without, without + emptyHook}
	p := nfttest.Must(openPath(ofNft(without)))
	defer func() { nfttest.Check(p.close()) }()
	l := nfttest.Must(p.sink())
	defer l.Close()
	for _, kind := range []struct {
		name  string
		times int // a turn is short, and the difference is small next to what TCP varies by
		turn  contender
	}{{"a datagram", 5, p.datagrams()}, {"a megabyte over TCP", 40, p.stream()}} {
		var all []contender
		for _, text := range texts {
			all = append(all, contender{prepare: func() error {
				nfttest.Must(p.top.Node.Output("flush ruleset\n"+text, "nft", "-f", "-"))
				_, err := kind.turn.turn(ctx) // the first packets after a change are slower
				return err
			}, run: func() (time.Duration, error) { return kind.turn.turn(ctx) }})
		}
		s := takeTurns(ctx, kind.times*b.rounds, all...)
		r := newRow(groupInvalid, targetSmall, kind.name, "µs", s[0])
		b.add(r.against("without dropInvalid", s[0], s[1]).targetOfMedian(1.03))
		b.add(r.against("an empty chain", s[0], s[2]))
	}
}

// invalidPort is where the outside host reads what pods send.
const invalidPort = 9

func (p *path) invalidTarget() netip.AddrPort {
	return netip.AddrPortFrom(p.top.OutsideV4, invalidPort)
}

// sink accepts TCP connections at the outside host and reads them.
func (p *path) sink() (l net.Listener, err error) {
	err = p.top.Outside.Do(func() error {
		l, err = net.Listen("tcp4", p.invalidTarget().String())
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, c) }()
		}
	}()
	return l, nil
}

// datagrams sends all datagrams of a turn over one connection.
func (p *path) datagrams() contender {
	dst := unix.SockaddrInet4{Addr: p.invalidTarget().Addr().As4(), Port: invalidPort}
	return p.sender(func() {}, func(fd int) error {
		for range flowsPerTurn {
			if err := unix.Sendto(fd, nil, 0, &dst); err != nil {
				return fmt.Errorf("send: %w", err)
			}
		}
		return nil
	})
}

// stream writes to one TCP connection, of which only the last part may be on its way at
// the end.
func (p *path) stream() contender {
	const megabytes = 16
	return contender{run: func() (took time.Duration, err error) {
		err = p.top.Pod.Do(func() error {
			c, err := net.Dial("tcp4", p.invalidTarget().String())
			if err != nil {
				return err
			}
			defer c.Close()
			block := make([]byte, 1<<20)
			start := time.Now()
			for range megabytes {
				if _, err := c.Write(block); err != nil {
					return err
				}
			}
			took = time.Since(start)
			return nil
		})
		return took / megabytes, err
	}}
}
