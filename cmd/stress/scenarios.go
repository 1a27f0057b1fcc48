package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// A scenario is something that happens repeatedly to a node in service.
type scenario struct {
	name string
	do   func(context.Context, *bench)
}

func scenarios() []scenario {
	return []scenario{
		{"the file changes, 4 CIDRs, nftables", fileChanges(nft.ModeNFTables, 4)},
		{"the file changes, 1,000 CIDRs, nftables", fileChanges(nft.ModeNFTables, 1000)},
		{"the file changes, 10,000 CIDRs, nftables", fileChanges(nft.ModeNFTables, 10_000)},
		{"the file changes, 4 CIDRs, iptables-nft", fileChanges(nft.ModeIPTables, 4)},
		{"the file changes, 1,000 CIDRs, iptables-nft", fileChanges(nft.ModeIPTables, 1000)},
		{"the file changes while exemptions are enforced, 4 CIDRs", enforcedChanges(4)},
		{"the file changes while exemptions are enforced, 1,000 CIDRs", enforcedChanges(1000)},
		{"conditions and enforcement come and go, 4 CIDRs", conditionsChange(4)},
		{"conditions and enforcement come and go, 1,000 CIDRs", conditionsChange(1000)},
		{"the file changes with fixed source addresses, 4 CIDRs", fixedChanges},
		{"addresses of the node come and go", addressesMove(snatKey)},
		{"addresses of the node come and go, snatRules", addressesMove(snatKey, randomRules(8))},
		{"snatRules and snatAddresses change, 8 entries", rulesChange(8)},
		{"snatRules and snatAddresses change, 64 entries", rulesChange(64)},
		{"snatRules alternate, one address, no agent", rulesAlternate(false)},
		{"snatRules alternate, two addresses, no agent", rulesAlternate(true)},
		{"portsPerPod names each of 50 pods", portsNamePods},
		{"connections lose their entry, dropInvalid", entriesVanish(true)},
		{"connections lose their entry, control without it", entriesVanish(false)},
		{"the mode changes, 4 CIDRs", modeChanges(4)},
		{"the mode changes, 1,000 CIDRs", modeChanges(1000)},
		{"killed and started again, 4 CIDRs", killed(4)},
		{"killed and started again, 10,000 CIDRs", killed(10_000)},
		{"replaced by a second process, 4 CIDRs", replaced(4)},
		{"replaced by a second process, 10,000 CIDRs", replaced(10_000)},
		{"taken over from an older agent, nftables", takenOver(nft.ModeNFTables)},
		{"taken over from an older agent, iptables-nft", takenOver(nft.ModeIPTables)},
		{"rules destroyed and restored, nftables", destroyed(nft.ModeNFTables)},
		{"rules destroyed and restored, iptables-nft", destroyed(nft.ModeIPTables)},
		{"first installation, 2,000 CIDRs, nftables", firstInstallation(nft.ModeNFTables, 2000)},
		{"first installation, 2,000 CIDRs, iptables-nft", firstInstallation(nft.ModeIPTables, 2000)},
	}
}

// inService starts the agent with the first policy, and connections through the
// node once it has installed its rules.
func (b *bench) inService(ctx context.Context, mode nft.Mode, n int, keys ...string) (*agent.Agent, [2]policy) {
	p := policies(n, keys...)
	return b.serve(ctx, mode, p), p
}

// serve is inService with these policies.
func (b *bench) serve(ctx context.Context, mode nft.Mode, p [2]policy) *agent.Agent {
	a := b.enforced(ctx, mode, p[0])
	b.hammerIt(ctx)
	return a
}

func fileChanges(mode nft.Mode, n int, keys ...string) func(context.Context, *bench) {
	return changes(mode, n, [2][]string{keys, keys})
}

// conditionsChange changes the lists together with each condition that mode nftables
// alone has: those of one file are not set in the other, and the targets stay
// masqueraded or exempt.
func conditionsChange(n int) func(context.Context, *bench) {
	return changes(nft.ModeNFTables, n, [2][]string{
		{
			"masqueradeHost: false",
			`masqueradeSrcInterfaces: ["pod*"]`,
			`masqueradeSrcCIDRs: [10.244.0.0/16, "fd00:10:244::/48"]`,
			`nonMasqueradeOutInterfaces: ["wg*"]`,
			"enforceNonMasquerade: true",
		},
		{`masqueradeOutInterfaces: ["eth*"]`, `nonMasqueradeSrcCIDRs: [10.245.0.0/16]`},
	})
}

// changes has the agent change between two files with these keys.
func changes(mode nft.Mode, n int, keys [2][]string) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		p := policiesWith(n, keys)
		a := b.serve(ctx, mode, p)
		for b.more(ctx) {
			b.updates++
			b.change(ctx, a, mode, p[b.updates%2])
		}
		b.inSync(ctx, p[b.updates%2].ruleset[mode])
	}
}

// anotherProgram masquerades all pod traffic, after our enforcing chain and
// before the masquerading one.
const anotherProgram = `table inet another {
	chain postrouting {
		type nat hook postrouting priority srcnat; policy accept;
		ip saddr 10.244.0.0/16 masquerade
		ip6 saddr fd00:10:244::/48 masquerade
	}
}
`

// enforcedChanges is like fileChanges, with another program that would masquerade
// exempt traffic, and with conditions on sources and interfaces.
func enforcedChanges(n int) func(context.Context, *bench) {
	change := fileChanges(nft.ModeNFTables, n,
		"enforceNonMasquerade: true",
		`masqueradeSrcCIDRs: [10.244.0.0/16, "fd00:10:244::/48"]`,
		`masqueradeSrcInterfaces: ["pod*"]`,
		`nonMasqueradeOutInterfaces: ["wg*"]`)
	return func(ctx context.Context, b *bench) {
		nfttest.Must(b.top.Node.Output(anotherProgram, "nft", "-f", "-"))
		change(ctx, b)
	}
}

// modeChanges replaces the agent with one in the other mode, together with the
// file.
func modeChanges(n int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		a, p := b.inService(ctx, nft.ModeNFTables, n)
		modes := [2]nft.Mode{nft.ModeNFTables, nft.ModeIPTables}
		for b.more(ctx) {
			b.updates++
			nfttest.Check(a.Stop())
			now, mode := p[b.updates/2%2], modes[b.updates%2]
			b.write(now)
			a = b.startAgent(mode)
			awaitPolicy(ctx, a, now.ruleset[mode])
			b.inSync(ctx, now.ruleset[mode])
		}
	}
}

// killed kills the agent at any point of an update.
func killed(n int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		a, p := b.inService(ctx, nft.ModeNFTables, n)
		var took time.Duration
		for b.more(ctx) {
			b.updates++
			now := p[b.updates%2]
			if b.updates%2 == 1 { // to know how long an update takes
				start := time.Now()
				b.change(ctx, a, nft.ModeNFTables, now)
				took = time.Since(start)
				continue
			}
			b.write(now)
			time.Sleep(rand.N(took))
			kill(a)
			a = b.startAgent(nft.ModeNFTables)
			awaitPolicy(ctx, a, now.ruleset[nft.ModeNFTables])
		}
		b.inSync(ctx, p[b.updates%2].ruleset[nft.ModeNFTables])
	}
}

// replaced starts a second agent next to the first, changes the file while both
// run, and stops the first, as a rolling update does.
func replaced(n int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		old, p := b.inService(ctx, nft.ModeNFTables, n)
		change := func() {
			b.updates++
			now := p[b.updates%2]
			b.write(now)
			b.awaitSync(ctx, now.ruleset[nft.ModeNFTables])
		}
		for b.more(ctx) {
			next := b.startAgent(nft.ModeNFTables)
			for range 5 {
				change()
			}
			nfttest.Check(old.Stop())
			change()
			old = next
		}
	}
}

// destroyed removes the agent's rules.
func destroyed(mode nft.Mode) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		a, p := b.inService(ctx, mode, 1000)
		attacks := attacks(mode)
		for b.more(ctx) {
			attack := attacks[b.updates%len(attacks)]
			b.updates++
			before := a.Count("rules_restored")
			b.whileAway(ctx, func() {
				b.attack(attack)
				restored := func() bool { return a.Count("rules_restored") > before }
				nfttest.Check(a.Until(ctx, "rules restored after: "+attack.name, restored))
			})
			b.flows(ctx, 20)
		}
		b.inSync(ctx, p[0].ruleset[mode])
	}
}

// firstInstallation starts the agent on a node without rules, in service.
func firstInstallation(mode nft.Mode, n int) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		a, p := b.inService(ctx, mode, n)
		for b.more(ctx) {
			b.updates++
			nfttest.Check(a.Stop())
			b.whileAway(ctx, func() {
				nfttest.Must(b.kernel.Cleanup(ctx, kernel.Ours))
				a = b.startAgent(mode)
				awaitPolicy(ctx, a, p[0].ruleset[mode])
			})
			b.flows(ctx, 20)
		}
		b.inSync(ctx, p[0].ruleset[mode])
	}
}

// An older agent's rules, as version 2 of ip-masq-agent writes them.
const (
	olderChain = "IP-MASQ"
	olderRules = `*nat
:%[1]s - [0:0]
-A POSTROUTING -m comment --comment "ip-masq-agent: ensure nat POSTROUTING directs all non-LOCAL destination traffic to our custom %[1]s chain" -m addrtype ! --dst-type LOCAL -j %[1]s
-A %[1]s -d %[2]s -m comment --comment "ip-masq-agent: local traffic is not subject to MASQUERADE" -m addrtype ! --dst-type LOCAL -j RETURN
-A %[1]s -m comment --comment "ip-masq-agent: outbound traffic is subject to MASQUERADE (must be last in chain)" -m addrtype ! --dst-type LOCAL -j MASQUERADE
COMMIT
`
)

// takenOver replaces our rules with an older agent's, as if the node had never
// had ours, and has the agent take them over.
func takenOver(mode nft.Mode) func(context.Context, *bench) {
	return func(ctx context.Context, b *bench) {
		a, p := b.inService(ctx, mode, 1000)
		for b.more(ctx) {
			b.updates++
			nfttest.Check(a.Stop())
			for program, exempt := range map[string]string{
				"iptables-nft-restore":  "10.0.0.0/8",
				"ip6tables-nft-restore": "fd00::/8",
			} {
				nfttest.Must(b.top.Node.Output(fmt.Sprintf(olderRules, olderChain, exempt), program, "--noflush"))
			}
			nfttest.Must(b.kernel.Cleanup(ctx, kernel.Ours))
			a = b.startAgent(mode, "--takeover")
			awaitPolicy(ctx, a, p[0].ruleset[mode])
			b.inSync(ctx, p[0].ruleset[mode])
		}
	}
}
