package main

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"testing"

	"nft-masq-agent/nft"

	"nft-masq-agent/nft/nfttest"
)

func TestMetricsCountTheConnections(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	inEachMode(t, func(t *testing.T, mode nft.Mode, flag string) {
		nfttest.Require(t, "nft", "iptables-nft")
		top := nfttest.NewTopology(t)
		n := nodeIn(t, top.Node)
		text := exempting("10.0.0.0/8", "fd00::/8") + "enableIPv6: true\n"
		n.swap(text)
		d := n.start(flag, "--http-address", httpAddress)
		want := wants(t, text, flag)
		d.began(want)
		connections := func(family, verdict string) string {
			return n.metric(fmt.Sprintf("nft_masq_agent_connections_total{family=%q,verdict=%q}", family, verdict))
		}
		sent := map[[2]string]int{}
		send := func(family, verdict, dst string, times int) {
			t.Helper()
			addr := netip.MustParseAddr(dst)
			src := top.PodV4
			if addr.Is6() {
				src = top.PodV6
			}
			for range times {
				s := nfttest.MustSend(t, top, nfttest.Flow{
					Proto: nfttest.UDP, From: top.Pod, Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(addr, 4000),
				})
				if s.Masqueraded() != (verdict == "masqueraded") {
					t.Errorf("%s: %+v, want %s", dst, s, verdict)
				}
			}
			sent[[2]string{family, verdict}] += times
		}
		compare := func() {
			t.Helper()
			for key, times := range sent {
				// In mode iptables-nft the result is cached for a while.
				d.until(fmt.Sprintf("%v: %d counted", key, times), func() bool {
					got, _ := strconv.Atoi(connections(key[0], key[1]))
					if got > times {
						t.Fatalf("%v: %d counted, %d sent", key, got, times)
					}
					return got == times
				})
			}
		}
		send("ipv4", "masqueraded", "198.51.100.8", 7)
		send("ipv4", "exempt", "10.9.0.9", 5)
		send("ipv6", "masqueraded", "2001:db8:1::1", 3)
		send("ipv6", "exempt", "fd00:9::9", 2)
		compare()
		if mode == nft.ModeIPTables { // a chain that is written again counts from zero
			clear(sent)
		}
		text = exempting("10.0.0.0/8", "fd00::/8", "203.0.113.0/24") + "enableIPv6: true\n"
		n.swap(text)
		d.applied("config", wants(t, text, flag))
		send("ipv4", "exempt", "203.0.113.9", 4)
		send("ipv4", "masqueraded", "198.51.100.8", 1)
		compare()
		d.silent()
		d.stop()
	})
}

func TestProbesDescribeTheState(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	d := n.start("--http-address", httpAddress)
	d.began(wants(t, ""))
	probe := func(path string, code int, body string) {
		t.Helper()
		if c, b := n.get(path); c != code || b != body+"\n" {
			t.Errorf("%s returned %d %q, want %d %q", path, c, b, code, body)
		}
	}
	probe("/healthz", 200, "ok")
	probe("/readyz", 200, "ok")
	n.swap(badText)
	d.await("config_rejected")
	probe("/healthz", 200, "ok")
	probe("/startupz", 200, "ok")
	probe("/readyz", 503, "config rejected: "+n.path+badProblem+"\nbuilt-in defaults ("+wants(t, "").Hash()+
		") are enforced")
	if got := n.metric("nft_masq_agent_config_accepted"); got != "0" {
		t.Errorf("config_accepted is %s", got)
	}
	n.swap("")
	d.await("config_accepted")
	d.await("config_file_appeared")
	d.await("config_warning") // it is empty
	probe("/readyz", 200, "ok")
	d.silent()
	if code, _ := n.get("/"); code != 404 {
		t.Errorf("/ returned %d", code)
	}
}

func TestWaitForRulesDoesNotWaitForAValidConfig(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	n.swap(badText)
	cmd := n.command(nil, "ready", "--wait-for", "[127.0.0.1]:9717")
	read, write := io.Pipe()
	cmd.Stdout = write
	p, err := n.Start(cmd)
	n.check(err)
	t.Cleanup(func() { _ = p.Kill() })
	lines := bufio.NewScanner(read)
	if lines.Scan(); !strings.HasPrefix(lines.Text(), "waiting: ") ||
		!strings.Contains(lines.Text(), "connection refused") {
		t.Fatal(lines.Text())
	}
	n.start("--http-address", httpAddress)
	for lines.Scan() && lines.Text() != "rules are installed" {
		if want := "waiting: no rules are installed yet"; lines.Text() != want {
			t.Errorf("printed %q, want %q", lines.Text(), want)
		}
	}
	if err := p.Wait(); err != nil {
		t.Error(err)
	}
	got := n.run("ready", "--wait-for", "127.0.0.1:9717", "-o", "json")
	if got.code != exitDone || !strings.Contains(got.stdout, `"asked": "started"`) {
		t.Errorf("as JSON: %+v", got)
	}
	if out, _ := n.Output("", "nft", "list", "tables"); !strings.Contains(out, nft.TableName) {
		t.Errorf("the node has %q", out)
	}
}
