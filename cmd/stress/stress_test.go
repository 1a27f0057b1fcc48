package main

import (
	"io"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

func TestMain(m *testing.M) { os.Exit(agent.Main(m)) }

// TestShortStress is `make stress` for half a minute: every scenario, every bad
// recipe and every attack, a few times each.
func TestShortStress(t *testing.T) {
	nfttest.SkipIfShort(t)
	nfttest.Require(t, "iptables-nft-restore", "ip6tables-nft-restore")
	var out strings.Builder
	args := []string{"--agent", agent.Program(t), "--each", "100ms", "--flows", "1", "--limit", "3m"}
	code := run(t.Context(), args, &out, &out)
	t.Log(out.String())
	if code != exitClean {
		t.Errorf("exit code %d, want %d", code, exitClean)
	}
}

func TestTooFewConnectionsAreAFailure(t *testing.T) {
	r := report{out: io.Discard, flows: 9}
	if r.end(settings{flows: 10}) {
		t.Error("clean with 9 connections of 10")
	}
}

func TestListsDecideAlikeForTargetsAndShareNothing(t *testing.T) {
	for _, n := range []int{4, 10, 1000, 10_000} {
		both := lists(n)
		for i, list := range both {
			for _, target := range targets() {
				holds := slices.ContainsFunc(list, func(p netip.Prefix) bool { return p.Contains(target.Dst) })
				if holds == target.Masqueraded {
					t.Errorf("list %d of %d: holds %s: %v", i, n, target.Dst, holds)
				}
			}
			if slices.ContainsFunc(list, func(p netip.Prefix) bool { return slices.Contains(both[1-i], p) }) {
				t.Errorf("list %d of %d shares a CIDR with the other", i, n)
			}
		}
	}
}
