package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"time"

	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/nfttest"
)

const groupApply = "full apply"

// Targets, as ratios, for the sizes that have one.
const (
	targetSmall = 10
	targetLarge = 100_000
)

// iptablesUpTo bounds the number of CIDRs that iptables loads.
const iptablesUpTo = 10_000

// apply measures applying the whole ruleset to a kernel without any of it.
func (b *bench) apply(ctx context.Context) {
	sizes := b.sizes
	if b.million {
		sizes = append(sizes[:len(sizes):len(sizes)], 1_000_000)
	}
	for _, n := range sizes {
		b.applyN(ctx, n)
	}
}

// An applyBench is what the contenders of one size use.
type applyBench struct {
	node   *node
	kernel *kernel.Kernel
	floor  *floor
	want   nft.Ruleset
	size   int
	dir    string // with the files config, nft and iptables
}

func (b *bench) applyN(ctx context.Context, n int) {
	a := nfttest.Must(openApply(n))
	defer func() { nfttest.Check(a.close()) }()
	contenders := []contender{a.fromRuleset(), a.kernelAlone(), a.program("nft", "-f", a.file("nft"))}
	large := n > 100_000 // more CIDRs than a config file may have
	if !large {
		contenders = append(contenders, a.process(b.agent))
	}
	if n <= iptablesUpTo {
		contenders = append(contenders, a.restore())
	}
	s := takeTurns(ctx, b.rounds, contenders...)
	ours, bare, byNft := s[0], s[1], s[2]
	fromRuleset := func() row { return newRow(groupApply, n, "from a ruleset", "ms", ours) }
	b.add(bounded(fromRuleset().against("nft -f", ours, byNft), map[int]float64{targetLarge: 0.4, targetSmall: 1}))
	b.add(bounded(fromRuleset().against("kernel's floor", ours, bare), map[int]float64{targetLarge: 1.4}))
	if n <= iptablesUpTo {
		b.add(fromRuleset().against("iptables-nft-restore", ours, s[4]))
	}
	if !large {
		whole := newRow(groupApply, n, "process, from the file", "ms", s[3]).against("nft -f", s[3], byNft)
		b.add(bounded(whole, map[int]float64{targetLarge: 0.6}))
	}
}

// bounded adds the target of the row's size.
func bounded(r row, targets map[int]float64) row {
	if bound, ok := targets[r.CIDRs]; ok {
		return r.target(bound)
	}
	return r
}

func openApply(n int) (*applyBench, error) {
	networks := shuffled(n, false)
	a := &applyBench{size: n, kernel: kernel.Open(), want: ruleset(networks, nft.ModeNFTables)}
	files := map[string]string{"config": text(networks), "nft": a.want.String()}
	if n <= iptablesUpTo {
		files["iptables"] = ruleset(networks, nft.ModeIPTables).String()
	}
	var err error
	if a.dir, err = quietDir(); err != nil {
		return nil, err
	}
	for name, content := range files {
		if err := os.WriteFile(a.file(name), []byte(content), 0o600); err != nil {
			return nil, err
		}
	}
	msgs, err := record(a.want)
	if err != nil {
		return nil, err
	}
	if a.node, err = openNode("node"); err != nil {
		return nil, err
	}
	a.floor, err = newFloor(a.node.ns, msgs)
	return a, err
}

func (a *applyBench) close() error {
	return errors.Join(a.kernel.Close(), a.floor.close(), a.node.close(), os.RemoveAll(a.dir))
}

func (a *applyBench) file(name string) string { return filepath.Join(a.dir, name) }

func (a *applyBench) clear() error {
	if err := a.node.clear(nft.TableName, a.size); err != nil {
		return err
	}
	runtime.GC() // garbage of the bench itself
	return nil
}

func (a *applyBench) fromRuleset() contender {
	return contender{a.clear, func() (took time.Duration, err error) {
		// Inside the namespace, because the first request opens the connection.
		err = a.node.ns.Do(func() error {
			start := time.Now()
			_, err := a.kernel.Apply(context.Background(), a.want, nft.Contents)
			took = time.Since(start)
			return err
		})
		return took, err
	}}
}

func (a *applyBench) kernelAlone() contender { return contender{a.clear, a.floor.send} }

func (a *applyBench) process(binary string) contender {
	return contender{a.clear, func() (time.Duration, error) {
		return timeToApplied(a.node, binary, a.file("config"))
	}}
}

func (a *applyBench) program(name string, args ...string) contender {
	return contender{a.clear, func() (time.Duration, error) {
		return runProgram(a.node.ns, nil, name, args...)
	}}
}

func (a *applyBench) restore() contender {
	return contender{a.clear, func() (time.Duration, error) {
		rules, err := os.Open(a.file("iptables"))
		if err != nil {
			return 0, err
		}
		defer func() { _ = rules.Close() }()
		return runProgram(a.node.ns, rules, "iptables-nft-restore", "--noflush")
	}}
}
