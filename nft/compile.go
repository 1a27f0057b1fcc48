package nft

import (
	"nft-masq-agent/config"
)

// Options are the command line's settings for a ruleset.
type Options struct {
	Layout      Layout
	RandomFully bool
	Ports       []PortRange
	Marks       []Mark // of packets to leave alone if exemptions are enforced
}

// A Built is what [Build] makes of the files of a config.
type Built struct {
	// Problems of the files: they are accepted if there are no [config.Problems.Faults].
	Problems config.Problems
	Config   config.Config
	// Ruleset is nil if there is an error. With mistakes alone it is what the older
	// agents make of the files.
	Ruleset *Ruleset
}

// Build parses and compiles the files of a config. The daemon and all commands
// use it. What the layout or the kernel cannot have is an error. The files are not
// needed while it compiles, so that their memory can be freed.
func Build(d config.Defaults, o Options, files ...config.Source) (b Built) {
	b.Config, b.Problems = config.Parse(d, files...)
	b.Problems = append(b.Problems, o.Layout.Check(b.Config)...)
	b.Problems = append(b.Problems, checkPortBlocks(b.Config, o)...)
	if b.Problems.Worst() == config.Error {
		return b
	}
	r := Compile(b.Config, o)
	b.Ruleset = &r
	return b
}

// Compile returns the ruleset for a config. It is pure, and it never fails: what
// the layout cannot express is left out.
func Compile(c config.Config, o Options) Ruleset {
	return CompilePolicy(NewPolicy(c, o), o.Layout)
}

// CompilePolicy is like Compile, for a policy.
func CompilePolicy(p Policy, l Layout) Ruleset {
	r := Ruleset{Policy: p, Layout: l, digest: p.digest()}
	r.Tables = l.Compile(p, r.Hash())
	return r
}
