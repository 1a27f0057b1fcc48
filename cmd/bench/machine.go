package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/nft/nfttest"
)

// describe records the machine and the versions of the programs.
func (b *bench) describe() error {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return fmt.Errorf("kernel: %w", err)
	}
	b.Date = time.Now().UTC().Format(time.DateOnly)
	b.Kernel = unix.ByteSliceToString(name.Release[:])
	b.Processors = runtime.NumCPU()
	b.Machine = processor()
	for _, p := range []struct {
		version *string
		name    string
		args    []string
	}{
		{&b.Agent, b.agent, []string{"version"}},
		{&b.Nft, "nft", []string{"--version"}},
		{&b.Iptables, "iptables-nft", []string{"--version"}},
	} {
		var out bytes.Buffer
		cmd := nfttest.Command(p.name, p.args...)
		cmd.Stdout = &out
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		*p.version, _, _ = strings.Cut(out.String(), "\n")
	}
	return nil
}

// processor returns the CPU model, if /proc/cpuinfo has one.
func processor() string {
	text, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return runtime.GOARCH
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
