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
	Config   config.Config
	Warnings []config.Problem
	Ruleset  Ruleset
	// Lenient is what the older agents make of files that are rejected, nil if
	// they reject them too, or the kernel could not hold it.
	Lenient *Ruleset
}

// Build parses and compiles the files of a config. The daemon and all commands
// use it. Mistakes in the files, and keys that the layout cannot express, are an
// error of type [config.Problems]. The files are not needed while it compiles, so
// that their memory can be freed.
func Build(d config.Defaults, o Options, files ...config.Source) (b Built, err error) {
	b.Config, b.Warnings, err = config.Parse(d, files...)
	if err != nil {
		if c, _, refused := config.Lenient(d, files...); refused == nil {
			b.Lenient = lenient(c, o)
		}
		return b, err
	}
	more, err := o.Layout.Check(b.Config)
	if err != nil {
		b.Lenient = lenient(b.Config, o)
		return b, err
	}
	b.Ruleset, b.Warnings = Compile(b.Config, o), append(b.Warnings, more...)
	return b, b.Ruleset.Check()
}

func lenient(c config.Config, o Options) *Ruleset {
	r := Compile(c, o)
	if r.Check() != nil {
		return nil
	}
	return &r
}

// Compile returns the ruleset for a config. It is pure, and it never fails: what
// the layout cannot express is left out.
func Compile(c config.Config, o Options) Ruleset {
	return CompilePolicy(NewPolicy(c, o), o.Layout)
}

// CompilePolicy is like Compile, for a policy such as one that was read back.
func CompilePolicy(p Policy, l Layout) Ruleset {
	r := Ruleset{Policy: p, Layout: l, digest: p.digest()}
	r.Tables = l.Compile(p, r.Hash())
	return r
}
