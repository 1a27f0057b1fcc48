package main

import (
	"context"
	"errors"
	"os"
	"time"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

// startAgent starts the agent and waits until its rules are in the kernel.
func startAgent(n *node, binary string, v *agent.Volume) (*agent.Agent, error) {
	a, err := agent.Start(n.ns, nfttest.Command(binary, "run", "--config", v.Path()))
	if err != nil {
		return nil, err
	}
	_, err = a.Await(context.Background(), "config_applied")
	return a, err
}

// timeToApplied runs the agent from its start until it logs that the rules are in
// the kernel. Like the programs it is compared with, it has no mount namespace of
// its own.
func timeToApplied(n *node, binary, config string) (time.Duration, error) {
	log := agent.NewLog()
	cmd := nfttest.Command(binary, "run", "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	start := time.Now()
	if err := n.ns.Do(cmd.Start); err != nil {
		return 0, err
	}
	_, err := log.Await(context.Background(), "config_applied")
	took := time.Since(start)
	err = errors.Join(err, cmd.Process.Kill())
	_ = cmd.Wait() // returns that it was killed
	return took, err
}

// quietDir creates a directory, like a mounted volume, away from directories in
// which programs create files all the time: inotify notifies the agent of every
// name in each directory on the way, which would disturb measurements at rest.
// Also, to watch a directory the kernel walks all names in its cache, including
// deleted ones, which took 14 ms for a /tmp with 380,000.
func quietDir() (string, error) {
	quiet := "/dev/shm"
	if _, err := os.Stat(quiet); err != nil {
		quiet = ""
	}
	return os.MkdirTemp(quiet, "bench-")
}

// newVolume creates a volume with a config, in a quiet directory.
func newVolume(text string) (*agent.Volume, error) {
	dir, err := quietDir()
	if err != nil {
		return nil, err
	}
	v := agent.NewVolume(dir)
	return v, v.Write([]byte(text))
}
