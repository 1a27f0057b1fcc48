package cli

import (
	"errors"
	"flag"
	"fmt"
	"io"
)

// UseFile makes an operand the config, as --config does.
func (o *Options) UseFile(operands []string) error {
	switch {
	case len(operands) == 0:
		return nil
	case operands[0] == "":
		return errors.New("the name of the file is empty")
	case o.Given("config"):
		return fmt.Errorf("%q and --config both name the config: omit one", operands[0])
	}
	return o.given.Set("config", operands[0])
}

// Given reports whether the command line has a flag.
func (o *Options) Given(name string) (given bool) {
	o.given.Visit(func(f *flag.Flag) { given = given || f.Name == name })
	return given
}

// ForCommand adapts the options for a command that reads a config once: an
// explicit path must exist, and - is standard input.
func (o *Options) ForCommand(input io.Reader) {
	o.Input = input
	o.MustExist = o.Given("config")
}
