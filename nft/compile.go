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

// Build parses and compiles the files of a config. The daemon and all commands
// use it. Mistakes in the files, and keys that the layout cannot express, are an
// error of type [config.Problems].
func Build(d config.Defaults, o Options, files ...config.Source) (c config.Config, r Ruleset, warnings []config.Problem, err error) {
	c, warnings, err = config.Parse(d, files...)
	if err != nil {
		return c, Ruleset{}, warnings, err
	}
	more, err := o.Layout.Check(c)
	if err != nil {
		return c, Ruleset{}, warnings, err
	}
	r = Compile(c, o)
	return c, r, append(warnings, more...), r.Check()
}

// BuildLenient returns what the older agents make of files that [Build] rejects, nil
// if they reject them too, or the kernel could not hold it.
func BuildLenient(d config.Defaults, o Options, files ...config.Source) *Ruleset {
	c, _, err := config.Lenient(d, files...)
	if err != nil {
		return nil
	}
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
