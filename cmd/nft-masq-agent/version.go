package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
)

// Set by the linker: -X main.version=v1.2.3 -X main.commit=HASH. Otherwise they
// are derived from the repository by Go.
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

func build() buildInfo {
	b := buildInfo{cli.NewHead("version"), program, version, commit, runtime.Version(), runtime.GOOS + "/" +
		runtime.GOARCH}
	if info, ok := debug.ReadBuildInfo(); ok {
		b.complete(info)
	}
	b.Release, b.Commit = cmp.Or(b.Release, "devel"), cmp.Or(b.Commit, "unknown")
	return b
}

// complete adds what Go has stamped, and the linker has not.
func (b *buildInfo) complete(info *debug.BuildInfo) {
	if info.Main.Version != "(devel)" {
		b.Release = cmp.Or(b.Release, info.Main.Version)
	}
	b.Commit = cmp.Or(b.Commit, revision(info.Settings))
}

// revision returns the commit that Go has stamped, if any.
func revision(settings []debug.BuildSetting) string {
	commit, modified := "", ""
	for _, s := range settings {
		switch {
		case s.Key == "vcs.revision":
			commit = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = "-dirty"
		}
	}
	return commit + modified
}

func (b *buildInfo) String() string {
	return fmt.Sprintf("%s %s\ncommit %s\n%s %s\n", b.Program, b.Release, b.Commit, b.GoVersion, b.Platform)
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
				b := build()
				return e.reply(output, &b)
			}
		},
	}
}
