package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
)

// Set by the linker: -X main.version=v1.2.3 -X main.commit=HASH. Otherwise they
// are derived from the repository by Go.
var version, commit string

// A buildInfo describes what this program was built from.
type buildInfo struct {
	version, commit, goVersion string
}

func build() buildInfo {
	b := buildInfo{version: version, commit: commit, goVersion: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if ok && b.version == "" && info.Main.Version != "(devel)" {
		b.version = info.Main.Version
	}
	if ok && b.commit == "" {
		b.commit = revision(info.Settings)
	}
	b.version, b.commit = cmp.Or(b.version, "devel"), cmp.Or(b.commit, "unknown")
	return b
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

func (b buildInfo) String() string {
	return fmt.Sprintf("%s %s\ncommit %s\n%s %s/%s", program, b.version, b.commit, b.goVersion, runtime.GOOS, runtime.GOARCH)
}

// A versionReport is the output of version -o json. Fields are only ever added.
type versionReport struct {
	Program   string `json:"program"`
	Version   string `json:"version"`
	Commit    string `json:"commit"`
	GoVersion string `json:"goVersion"`
	Platform  string `json:"platform"`
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
				report := versionReport{program, b.version, b.commit, b.goVersion, runtime.GOOS + "/" + runtime.GOARCH}
				return exitDone, e.reply(output, report, func() string { return b.String() + "\n" })
			}
		},
	}
}
