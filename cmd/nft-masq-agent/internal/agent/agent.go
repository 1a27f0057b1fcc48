package agent

import (
	"context"
	"io"
	"net/http"
	"net/netip"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/node"
)

// A Kernel is what the loop reads and writes: a [kernel.Kernel], or a fake in tests.
type Kernel interface {
	Apply(context.Context, nft.Ruleset, nft.Depth) (kernel.Applied, error)
	Installed(context.Context) (nft.Installed, bool, error)
	OlderDecides(context.Context) (bool, error)
	Counters(nft.Layout) ([]nft.Counts, error)
}

// Inputs are the events that the loop waits for, and what it reads besides rules.
type Inputs struct {
	Files  <-chan Files // files that are missing for a moment are no content
	Reread func()       // makes the watcher read the files now
	Hangup <-chan os.Signal

	Generation func() (uint32, error) // of the ruleset
	Processor  func() time.Duration   // processor time of this process, as by ProcessorTime

	// Addresses lists those of the node, and Follow reports their changes. Both are
	// called when a config first has snatAddresses.
	Addresses func() ([]netip.Addr, error)
	Follow    func(context.Context) <-chan node.Change

	// Lock takes the lock of the network namespace, and fails while another process has it. Then Announce takes the place
	// of the second agent, and fails while a third one has that. Holder returns the process that has the lock, and
	// Announced the one in the place of the second.
	Lock      func() (io.Closer, error)
	Announce  func() (io.Closer, error)
	Holder    func() (pid int, found bool)
	Announced func() (pid int, found bool)
}

// Settings are the options of the command line that the loop needs, and what describes the
// program.
type Settings struct {
	ConfigPath string
	Defaults   config.Defaults
	NFT        nft.Options
	TakeOver   bool

	Version   string
	Commit    string
	Args      []string      // of the program, after its name and that of the command
	LostLines func() uint64 // of the log
}

// An Agent is the loop and its observers. Run is for one goroutine; the other methods
// may be called at any time, and do not wait for it.
type Agent struct {
	in       Inputs
	kernel   Kernel
	settings Settings
	log      *zap.SugaredLogger
	metrics  *metrics

	latest    atomic.Pointer[view]      // for probes, metrics and commands
	published atomic.Pointer[published] // for observers, after the log
	busySince atomic.Int64              // in ns since 1970; 0: the loop waits, -1: it has ended

	schedule  schedule
	moves     <-chan node.Change // of addresses; nil until a policy needs them
	second    *second
	observers []Observer
	problems  func() config.Problems  // of the last minute; nil: none are known
	served    map[string]http.Handler // on the socket, by pattern
}

// published is a view for observers.
type published struct {
	view
	outdated chan struct{} // closed when there is another one
}

// New returns an agent. Run starts it.
func New(in Inputs, k Kernel, s Settings, log *zap.Logger) *Agent {
	a := &Agent{
		in: in, kernel: k, settings: s, log: log.Sugar(),
		schedule: newSchedule(config.Default(s.Defaults).ResyncInterval),
	}
	a.latest.Store(&view{})
	a.published.Store(&published{outdated: make(chan struct{})})
	a.second = &second{Agent: a}
	a.observers = []Observer{a.second}
	a.metrics = newMetrics(a)
	return a
}

// Reasons for comparing the kernel, as the log and the metrics name them.
const (
	onStart  = "start"
	onConfig = "config"
	onDrift  = "drift" // other programs may have changed something
	onResync = "resync"
	onHangup = "sighup"
	onRetry  = "retry"

	onAddresses = "addresses"
)

// An event is why the loop does something.
type event struct {
	reason string
	files  *Files       // a new content of the config, nil: none
	moved  *node.Change // a change of the addresses of the node, nil: none
	depth  nft.Depth    // what to compare
}

// listsAddresses reports whether the addresses of the node are listed, also if no change of them was reported.
func (e event) listsAddresses() bool { return e.reason == onResync || e.reason == onHangup }

// checks reports whether the kernel is compared even with an unchanged policy.
func (e event) checks() bool { return e.files == nil && e.moved == nil }

// Run is the loop. It returns when ctx is done; the rules stay.
func (a *Agent) Run(ctx context.Context) {
	a.second.try()
	var group sync.WaitGroup
	for _, o := range a.observers {
		group.Go(func() { o.Run(ctx) })
	}
	defer group.Wait()
	defer a.busySince.Store(-1)
	for v := (view{}); ; {
		a.busySince.Store(0)
		e, ok := a.wait(ctx, v)
		if !ok {
			return
		}
		a.busySince.Store(time.Now().UnixNano())
		v = a.handle(ctx, v, e)
	}
}

// wait returns the next event, or false if ctx is done.
func (a *Agent) wait(ctx context.Context, v view) (event, bool) {
	// After a check of the rules, that of the elements may be due at the same generation. It is an event of its own, so
	// that it is charged to its own pace.
	if v.attempt.reason == onDrift && v.attempt.depth == nft.Frame {
		if e, due := a.dueElements(v, a.schedule.rules.seen); due {
			return e, true
		}
	}
	for {
		moves := a.moves
		if !a.schedule.addresses.ready(time.Now()) {
			moves = nil // the change waits in the channel, where a later one replaces it
		}
		select {
		case <-ctx.Done():
			return event{}, false
		case f := <-a.in.Files:
			return event{reason: onConfig, files: &f, depth: nft.Contents}, true
		case c := <-moves:
			return event{reason: onAddresses, moved: &c, depth: nft.Frame}, true
		case <-a.in.Hangup:
			a.in.Reread()
			return event{reason: onHangup, depth: nft.TakeOver}, true
		case <-a.schedule.timer.C:
			a.in.Reread()
			if v.failure != nil {
				return event{reason: onRetry, depth: nft.Contents}, true
			}
			return event{reason: onResync, depth: a.resyncDepth()}, true
		case <-a.schedule.ticker.C:
			if e, due := a.dueCheck(v); due {
				return e, true
			}
		}
	}
}

// handle handles an event: the policy is chosen, applied and reported.
func (a *Agent) handle(ctx context.Context, previous view, e event) view {
	start := time.Now()
	spent := a.in.Processor()
	v := previous
	v.attempt = attempt{reason: e.reason}
	if e.files != nil {
		v.read = true
		v.attempt.read = true
		v.content = a.compile(*e.files)
		v.configured = v.configured || config.Count(e.files.Sources) > 0
		if v.installed == nil {
			v.attempt.reason = onStart
		}
	}
	err := a.choosePolicy(ctx, &v, e)
	if err == nil {
		err = a.addAddresses(ctx, &v, e)
	}
	if v.policy.want != previous.policy.want {
		a.publish(v) // for observers that act for the policy in the kernel
	}
	depth := a.depth(v, e)
	v.attempt.depth = depth
	switch {
	case err != nil:
	case v.policy.want == nil:
		v.failure = nil
		v.tries = 0
	case e.checks() || v.policy.want != previous.policy.want:
		err = a.apply(ctx, &v, depth)
	}
	if ctx.Err() != nil {
		return previous // the agent ends, and has said so
	}
	v.attempt.err = err
	// Next to programs that write all the time, a check can end without an answer. That is no failure as long as our rules
	// were right before, and no difference was seen.
	onlyUnknown := kernel.Delayed(err) && v.inForce() && !v.attempt.differs
	if err != nil && !onlyUnknown {
		v.failure = err
		if e.reason != onDrift || previous.failure == nil { // a check that others cause does not delay the next try
			v.tries++
		}
	}
	v.attempt.took = time.Since(start)
	v.attempt.cost = a.schedule.cost(spent, a.in.Processor())
	a.plan(&v, previous, depth)
	// First the view, then the log: who reads the line finds the agent ready.
	a.latest.Store(&v)
	a.metrics.count(v)
	for _, l := range a.report(previous, v) {
		a.log.Logw(l.level, l.text, l.fields...)
	}
	quiet := v.attempt.cause == noCause && v.failure == nil && previous.failure == nil
	if e.reason == onDrift && depth == nft.Frame && quiet {
		return v // observers are not woken up for nothing, four times a second next to a program that commits
	}
	a.publish(v)
	return v
}

// apply writes the wanted rules into the kernel, and records what that did.
func (a *Agent) apply(ctx context.Context, v *view, depth nft.Depth) error {
	applied, err := a.kernel.Apply(ctx, *v.policy.want, depth)
	if err != nil {
		v.attempt.differs = len(applied.Differences) > 0
		return err
	}
	*v = v.withApplied(applied, time.Now())
	if len(applied.Differences) > 0 {
		FreeMemorySoon() // sets and messages are large
	}
	return nil
}

// FreeMemorySoon returns unused memory to the system after a second.
func FreeMemorySoon() { time.AfterFunc(time.Second, debug.FreeOSMemory) }

// compile returns what the files mean.
func (a *Agent) compile(f Files) content {
	c := content{files: f.Sources, readAt: time.Now()}
	if !f.readable() {
		c.err = f.Err
		return c
	}
	b := nft.Build(a.settings.Defaults, a.settings.NFT, f.Sources...)
	c.want = b.Ruleset
	c.remarks = b.Problems.Remarks()
	c.err = b.Problems.Err()
	c.resync = b.Config.ResyncInterval
	c.stale = b.Config.StaleConnections
	if c.err == nil { // a file of blanks is not empty if they are a syntax error
		c.missing = f.missing(a.settings.ConfigPath)
	}
	return c
}

// choosePolicy chooses the policy for a new content. It chooses again if the kernel could not be read, and as long as
// rules of a previous run stay, which may go.
func (a *Agent) choosePolicy(ctx context.Context, v *view, e event) error {
	if !v.read || e.files == nil && v.policy.source != "" && v.policy.inherited == nil {
		return nil
	}
	var n situation
	if v.content.err != nil && v.policy.want == nil {
		n.defaults = a.compile(Files{})
		installed, found, err := a.kernel.Installed(ctx)
		if found {
			n.previous = &installed
		} else if err == nil && v.content.want == nil {
			n.older, err = a.kernel.OlderDecides(ctx)
		}
		if err != nil {
			v.policy = policy{}
			return err
		}
	}
	v.policy = nextPolicy(v.policy, v.content, n)
	if e.files != nil {
		v.tries = 0
	}
	return nil
}

// addAddresses completes the wanted ruleset with the addresses of this node. They are listed at first, and then
// followed; a resync and a SIGHUP list them again.
func (a *Agent) addAddresses(ctx context.Context, v *view, e event) error {
	if e.moved != nil {
		v.unfollowed = e.moved.Err
		if e.moved.Err == nil && !e.moved.At.Before(v.listed) {
			v.addresses = e.moved.Addresses
			v.listed = e.moved.At
		}
	}
	if v.policy.want == nil || !v.policy.want.Policy.HasSNAT() {
		return nil
	}
	if a.moves == nil || e.listsAddresses() {
		listed := time.Now()
		list, err := a.in.Addresses()
		if err == nil {
			v.addresses = list
			v.listed = listed
		} else if a.moves == nil {
			return err
		}
		if a.moves == nil {
			a.moves = a.in.Follow(ctx)
		}
	}
	if placed := v.policy.want.WithAddresses(v.addresses); !placed.Same(*v.policy.want) {
		v.policy.want = &placed
	}
	return nil
}

// publish makes a view the one that probes, metrics, commands and observers see.
func (a *Agent) publish(v view) {
	a.latest.Store(&v)
	close(a.published.Swap(&published{v, make(chan struct{})}).outdated)
}

func (a *Agent) current() view { return *a.latest.Load() }
