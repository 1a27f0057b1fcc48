package main

import (
	"cmp"
	"context"
	"flag"
	"runtime"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
)

// Set by the linker: -X main.version=v1.2.3 -X main.commit=HASH.
var version, commit string

// A buildInfo describes what this program was built from.
type buildInfo struct {
	cli.Head
	// Program is the name of the program.
	Program string `json:"program"`
	// Release is the version of the program, devel if it has none.
	Release string `json:"release"`
	// Commit of the source, with -dirty if that was modified.
	Commit string `json:"commit"`
	// GoVersion that built the program.
	GoVersion string `json:"goVersion"`
	// Platform is operating system and architecture.
	Platform string `json:"platform"`
}

func build() *buildInfo {
	return &buildInfo{
		cli.NewHead("version"), program, cmp.Or(version, "devel"), cmp.Or(commit, "unknown"), runtime.Version(),
		runtime.GOOS + "/" + runtime.GOARCH,
	}
}

// Print writes the answer as text.
func (b *buildInfo) Print(t cli.Text) {
	t.Line("%s %s\ncommit %s\n%s %s", b.Program, b.Release, b.Commit, b.GoVersion, b.Platform)
}

func versionCommand() command {
	return command{
		name:     "version",
		about:    "print version, commit and Go version",
		examples: []string{program + " version", program + " version -o json"},
		flags: func(fs *flag.FlagSet) action {
			var output string
			addOutput(fs, &output)
			return func(_ context.Context, _ []string, e environment) (int, error) {
				return e.reply(output, build())
			}
		},
	}
}
