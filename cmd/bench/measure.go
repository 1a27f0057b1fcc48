package main

import (
	"encoding/json"
	"fmt"
	"os"
	"syscall"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// A usage is what a process needed from its start to its end.
type usage struct {
	Took      time.Duration `json:"took"`
	Processor time.Duration `json:"processor"`
	Peak      int64         `json:"peak"` // resident memory in bytes
}

// launch is the first argument of a process of this program that only starts another one. The kernel
// counts the memory of the process that starts a program as that program's, and this one's is large.
const launch = "launch"

// measured runs a program in a namespace and returns what it needed.
func measured(ns *nfttest.NS, program string, args ...string) (u usage, err error) {
	self, err := os.Executable()
	if err != nil {
		return usage{}, err
	}
	text, err := ns.Output("", self, append([]string{launch, program}, args...)...)
	if err != nil {
		return usage{}, err
	}
	err = json.Unmarshal([]byte(text), &u)
	return u, err
}

// launched runs a program without its output, and prints what it needed.
func launched(program string, args []string) error {
	cmd := nfttest.Command(program, args...)
	start := time.Now()
	err := cmd.Run()
	if err != nil && (cmd.ProcessState == nil || cmd.ProcessState.ExitCode() > 1) { // 1: there is a problem
		return fmt.Errorf("%s: %w", program, err)
	}
	resources := cmd.ProcessState.SysUsage().(*syscall.Rusage)
	return json.NewEncoder(os.Stdout).Encode(usage{
		Took: time.Since(start), Processor: time.Duration(resources.Utime.Nano() + resources.Stime.Nano()),
		Peak: resources.Maxrss * 1024,
	})
}
