package main

import (
	"context"
	"os"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

const groupPhases = "phases of one changed CIDR"

// phases measures the steps of a change of one CIDR among n, in the process of the bench. What the whole change takes
// beyond them is the way of the file: events, checks, and waking up.
func (b *bench) phases(ctx context.Context) {
	for _, n := range b.sizes {
		b.phasesN(ctx, n)
	}
}

func (b *bench) phasesN(ctx context.Context, n int) {
	a := nfttest.Must(openApply(n))
	defer func() { nfttest.Check(a.close()) }()
	floor := takeTurns(ctx, b.rounds, a.kernelAlone())[0]
	nfttest.Check(a.clear())
	c := &change{applyBench: a}
	steps := c.steps()
	took := make([]series, len(steps))
	for round := range b.rounds + 2 { // the first ones fill both sets
		nfttest.Check(ctx.Err())
		nfttest.Check(c.swap())
		for i, s := range steps {
			start := time.Now()
			nfttest.Check(s.run())
			if round >= 2 {
				took[i] = append(took[i], time.Since(start).Seconds())
			}
		}
	}
	for i, s := range steps {
		b.add(newRow(groupPhases, n, s.name, "ms", took[i]))
	}
	b.add(newRow(groupPhases, n, "the kernel's floor", "ms", floor))
}

// A step is a part of a change.
type step struct {
	name string
	run  func() error
}

// A change is what becomes of a file, of which two contents alternate.
type change struct {
	*applyBench
	more     bool // the content with one CIDR more
	sources  []config.Source
	config   config.Config
	wanted   nft.Ruleset
	previous nft.Ruleset
}

// swap writes the other content.
func (c *change) swap() error {
	c.more = !c.more
	c.previous = c.wanted
	c.node.settle(c.size)
	return os.WriteFile(c.file("config"), []byte(text(shuffled(c.size, c.more))), 0o600)
}

// steps are those of the agent, in its order.
func (c *change) steps() []step {
	return []step{
		{"read the file", func() (err error) {
			c.sources, err = config.Read(c.file("config"))
			return err
		}},
		{"parse", func() error {
			var problems config.Problems
			c.config, problems = config.Parse(config.Defaults{}, c.sources...)
			return problems.Err()
		}},
		{"compile and hash", func() error {
			c.wanted = nft.Compile(c.config, nft.Options{Layout: c.want.Layout, RandomFully: true})
			return nil
		}},
		{"compare with the kernel, fill the other set, switch", func() error {
			return c.node.ns.Do(func() error {
				_, err := c.kernel.Apply(context.Background(), c.wanted, nft.Contents)
				return err
			})
		}},
		{"list what was added and removed", func() error {
			const few = 10
			c.wanted.Policy.Additions(c.previous.Policy, few)
			c.previous.Policy.Additions(c.wanted.Policy, few)
			return nil
		}},
	}
}
