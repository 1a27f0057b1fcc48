package main

import (
	"context"
	"crypto/sha256"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"sync"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/watch"
)

func runCommand() command {
	return command{
		name:  "run",
		about: "run the daemon: apply the config and keep it applied",
		details: "It reads the config, writes only differences to the kernel, follows the file, and restores the rules if " +
			"another program changes them. It exits on SIGTERM and SIGINT, and the rules stay; SIGHUP makes it re-check " +
			"everything at once.",
		examples: []string{
			program + " run",
			program + " run --config /etc/config --http-address 127.0.0.1:9717",
			program + " --masq-chain=IP-MASQ --nomasq-all-reserved-ranges --v=2",
		},
		flags: func(fs *flag.FlagSet) action {
			o := cli.AddRunFlags(fs)
			return func(ctx context.Context, _ []string, e environment) (int, error) {
				return run(ctx, *o, e)
			}
		},
	}
}

// lastLines is how long writing the last log lines may take when the agent exits.
const lastLines = 100 * time.Millisecond

func run(ctx context.Context, o cli.Options, e environment) (int, error) {
	// There is one thing to do at a time. With more CPUs, the runtime searches
	// for more work on them at each event, which takes longer than the event.
	runtime.GOMAXPROCS(1)
	ctx, restore := signal.NotifyContext(ctx, unix.SIGTERM, unix.SIGINT)
	defer restore()
	// After the first signal, a second one kills the process, as by default.
	context.AfterFunc(ctx, restore)
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, unix.SIGHUP)
	defer signal.Stop(hangup)

	lines := newLineQueue(e.stdout)
	defer lines.Close(lastLines)
	log := newLogger(lines, o)
	ended := startAgent(ctx, o, e.kernel, log, hangup, lines.lost.Load)
	<-ctx.Done()
	log.Info("exiting; the rules stay", zap.String("event", "exiting"))
	// The loop ends at once unless it is in the middle of a large transaction,
	// which is atomic.
	select {
	case <-ended:
	case <-time.After(200 * time.Millisecond):
	}
	return exitDone, nil
}

// startAgent starts the loop and its inputs. The returned channel is closed when
// all of them have ended.
func startAgent(ctx context.Context, o cli.Options, k *kernel.Kernel, log *zap.Logger, hangup <-chan os.Signal,
	lostLines func() uint64,
) <-chan struct{} {
	files, reread := watch.Follow(ctx, o.ConfigPath, func() (agent.Files, string, int) {
		sources, err := config.Read(o.ConfigPath)
		read := agent.Files{Sources: sources, Err: err}
		return read, fingerprint(sources, err), read.Count()
	})
	own, observe := observed(ctx, k, o)
	loop := agent.New(
		agent.Inputs{
			Files: files, Reread: reread, Hangup: hangup,
			Generation: k.Generation, Processor: agent.ProcessorTime,
			Addresses: node.Addresses, Follow: node.Follow,
			Lock: running.Lock, Announce: running.Announce, Holder: running.Holder, Announced: running.Announced,
		},
		own,
		agent.Settings{
			ConfigPath: o.ConfigPath, Defaults: o.Defaults, NFT: o.NFT(), TakeOver: o.TakeOver,
			Version: build().Release, Commit: build().Commit, Args: args(), LostLines: lostLines,
		},
		log,
	)
	observe(loop)
	var parts sync.WaitGroup
	if o.HTTPAddress != "" {
		served := agent.Serve(ctx, agent.ListenTCP, o.HTTPAddress, loop.Handler(), log)
		parts.Go(func() { <-served })
	}
	if o.ProbeSocket != "" {
		served := agent.Serve(ctx, agent.ListenSocket, o.ProbeSocket, loop.SocketHandler(), log)
		parts.Go(func() { <-served })
	}
	parts.Go(func() { loop.Run(ctx) })
	ended := make(chan struct{})
	go func() {
		parts.Wait()
		close(ended)
	}()
	return ended
}

// args returns the flags of the running agent, for commands that follow them.
func args() []string {
	_, args := skipOlderName(os.Args[1:])
	if len(args) > 0 && args[0] == "run" {
		args = args[1:]
	}
	return args
}

func fingerprint(sources []config.Source, err error) string {
	h := sha256.New()
	for _, s := range sources {
		_, _ = fmt.Fprintf(h, "%q %d\n", s.Name, len(s.Data))
		_, _ = h.Write(s.Data)
	}
	_, _ = fmt.Fprintf(h, "%d %v", len(sources), err)
	return string(h.Sum(nil))
}
