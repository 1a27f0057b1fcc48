package main

import (
	"context"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
)

// version is set by the linker: -X main.version=v1.2.3.
var version = "devel"

// A buildInfo says what this program was built from.
type buildInfo struct {
	version, commit, goVersion string
}

func build() buildInfo {
	b := buildInfo{version: version, commit: "unknown", goVersion: runtime.Version()}
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return b
	}
	modified := ""
	for _, s := range info.Settings {
		switch {
		case s.Key == "vcs.revision":
			b.commit = s.Value
		case s.Key == "vcs.modified" && s.Value == "true":
			modified = ", modified"
		}
	}
	b.commit += modified
	return b
}

func (b buildInfo) String() string {
	return fmt.Sprintf("%s %s\ncommit %s\n%s %s/%s", program, b.version, b.commit, b.goVersion, runtime.GOOS, runtime.GOARCH)
}

func versionCommand() command {
	return command{
		name:     "version",
		about:    "prints version, commit and Go version",
		examples: []string{program + " version"},
		flags: func(*flag.FlagSet) action {
			return func(_ context.Context, _ []string, e environment) (int, error) {
				return exitDone, write(e.stdout, build().String()+"\n")
			}
		},
	}
}
