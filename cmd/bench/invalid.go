package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

const groupInvalid = "what dropInvalid costs an open connection"

// invalid measures packets of connections that are open, which the chain that drops others
// lets pass: small datagrams one by one, and as much as goes through one TCP connection.
func (b *bench) invalid(ctx context.Context) (err error) {
	c := config.Default(config.Defaults{})
	c.MasqueradeSrcCIDRs = []config.CIDR{{Prefix: netip.MustParsePrefix("10.244.0.0/16")}}
	layout := ruleset(nil, nft.ModeNFTables).Layout
	var opened []*path
	defer func() {
		for _, p := range opened {
			err = errors.Join(err, p.close())
		}
	}()
	var datagrams, streams []contender
	for _, drop := range []*config.Position{nil, {}} {
		c.DropInvalid = drop
		p, err := openPath("nft", nft.Compile(c, nft.Options{Layout: layout, RandomFully: true}).String(), "-f", "-")
		if p != nil {
			opened = append(opened, p)
		}
		if err != nil {
			return err
		}
		l, err := p.sink()
		if err != nil {
			return err
		}
		defer l.Close()
		datagrams, streams = append(datagrams, p.datagrams()), append(streams, p.stream())
	}
	const times = 5 // a turn is short, and the difference small
	for _, kind := range []struct {
		name, unit string
		contenders []contender
	}{{"a datagram", "µs", datagrams}, {"a megabyte over TCP", "µs", streams}} {
		s, err := takeTurns(ctx, times*b.rounds, kind.contenders...)
		if err != nil {
			return err
		}
		r := newRow(groupInvalid, targetSmall, kind.name, kind.unit, s[1])
		b.add(bounded(r.against("without dropInvalid", s[1], s[0]), map[int]float64{targetSmall: 1.03}))
	}
	return nil
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
	const megabytes = 64
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
