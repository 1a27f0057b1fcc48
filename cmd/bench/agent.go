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

// timeToApplied is the whole process, from its start to its word that the rules
// are in the kernel. It is started as the programs are that it is compared with,
// without a mount namespace of its own.
func timeToApplied(n *node, binary, config string) (time.Duration, error) {
	log := agent.NewLog()
	cmd := nfttest.Command(binary, "run", "--config", config)
	cmd.Stdout, cmd.Stderr = log, log
	start := time.Now()
	if err := n.ns.Do(cmd.Start); err != nil {
		return 0, err
	}
	_, err := log.Await(context.Background(), nil, "config_applied")
	took := time.Since(start)
	err = errors.Join(err, cmd.Process.Kill())
	_ = cmd.Wait() // says that it was killed
	return took, err
}

// quietDir makes a directory, as a mounted volume is, not beside where programs
// make files all the time: inotify tells the agent of every name in each directory
// on the way, which would not be rest, and to watch a directory the kernel goes
// through all names that it remembers of it, those that are gone too, which took
// 14 ms for a /tmp with 380,000.
func quietDir() (string, error) {
	quiet := "/dev/shm"
	if _, err := os.Stat(quiet); err != nil {
		quiet = ""
	}
	return os.MkdirTemp(quiet, "bench-")
}

// newVolume makes a volume with a config, in a quiet directory.
func newVolume(text string) (*agent.Volume, error) {
	dir, err := quietDir()
	if err != nil {
		return nil, err
	}
	v := agent.NewVolume(dir)
	return v, v.Write([]byte(text))
}
