package agent

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"net/netip"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"go.uber.org/zap"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/kernel"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/node"
)

// Files is the settled content of the config, or the error of reading it.
type Files struct {
	Sources []config.Source
	Err     error
}

// absent reports whether there is no file, or none that is read.
func (f Files) absent() bool {
	return !slices.ContainsFunc(f.Sources, func(s config.Source) bool { return !s.Ignored })
}

// large reports whether processing it takes more than a few milliseconds.
func (f Files) large() bool {
	n := 0
	for _, s := range f.Sources {
		n += len(s.Data)
	}
	return n > 64<<10
}

// Inputs are the events that the loop waits for, and what it reads besides rules.
type Inputs struct {
	Files    <-chan Files
	Warnings <-chan error // from the watcher
	Reread   func()       // makes the watcher read the files now
	Hangup   <-chan os.Signal

	// Changes are delivered between Join and Leave.
	Changes    <-chan Heard
	Join       func() error
	Leave      func()
	Generation func() (uint32, error) // of the ruleset

	// Addresses lists those of the node, and Follow reports their changes. Both are
	// called when a config first has snatAddresses.
	Addresses  func() ([]netip.Addr, error)
	Follow     func(context.Context) <-chan node.Change
	Interfaces func() ([]node.Interface, error)
	Pressure   func() (conntrack.Pressure, error)
}

// Settings are the options of the command line, and what describes the program.
type Settings struct {
	options.Options
	Version   string
	Commit    string
	Args      []string      // of the program, after its name and that of the command
	LostLines func() uint64 // of the log; it may be nil
}

// An Agent is the state of the loop. It is for one goroutine, except
// [Agent.Alive], [Agent.Ready] and [Agent.Handler].
type Agent struct {
	in       Inputs
	kernel   Kernel
	settings Settings
	log      *zap.Logger
	health   health
	metrics  *metrics

	policy  policy
	content content // last read
	progress
	started    bool
	file       *bool           // whether it existed when last read; nil: unknown
	rejection  error           // of the last content, nil if it was accepted
	withdrawn  time.Time       // when the older agent's rules were first missing, while they were active
	warned     map[string]bool // warnings about the last content
	takeOver   *time.Timer     // the next check for rules of older agents
	takeOverAt time.Time       // the earliest time for it

	resync   time.Duration
	looked   time.Time     // when everything was last checked
	lookTook time.Duration // duration, unless it wrote
	timer    *time.Timer   // the next resync, or the next retry after a rejection
	drift    drift
	survey   survey
	absent   []nft.AbsentInterface // as last logged

	addresses addresses

	staleConnections config.Stale   // of the last accepted config
	changedPolicy    chan effective // the last one that was applied
}

// progress is the progress of applying the policy to the kernel. All fields are
// reset when the kernel has accepted it.
type progress struct {
	held       string       // hash of our rules when the kernel was last read, "" for none
	heldPolicy nft.Policy   // with that hash
	fresh      bool         // a new policy was decided and is not in the kernel yet
	moved      bool         // the node's addresses changed it, and it is not in the kernel yet
	recovered  bool         // a config was accepted after a rejected one
	pending    layout.Depth // what to check for the first accepted config
	refused    string       // the kernel's last error
	tries      int          // since the decision
}

// New returns an agent. Run starts it.
func New(in Inputs, k Kernel, s Settings, log *zap.Logger) *Agent {
	resync := config.Default(s.Defaults).ResyncInterval
	a := &Agent{
		in: in, kernel: k, settings: s, log: log,
		resync:   resync,
		timer:    time.NewTimer(resync),
		takeOver: stoppedTimer(),
		drift:    newDrift(time.Now()),
		survey:   survey{seed: maphash.MakeSeed(), results: make(chan surveyed, 1)},

		changedPolicy: make(chan effective, 1),
	}
	a.metrics = newMetrics(&a.health, k, s)
	return a
}

func stoppedTimer() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// Reasons for checking the kernel, as the log and the metrics name them.
const (
	onStart   = "start"
	onConfig  = "config"
	onDrift   = "drift"
	onResync  = "resync"
	onHangup  = "sighup"
	onRefusal = "retry"

	onAddresses = "addresses"
)

// Run is the loop. It returns when ctx is done; the rules stay.
func (a *Agent) Run(ctx context.Context) {
	defer a.health.set(func(s *state) { s.stopped = true })
	defer a.timer.Stop()
	defer a.takeOver.Stop()
	defer a.drift.alarm.Stop()
	defer func() {
		if a.survey.running {
			<-a.survey.results
		}
	}()
	defer func() {
		if a.drift.listening {
			a.in.Leave()
		}
	}()
	if a.settings.ConntrackInterval > 0 {
		go a.watchPressure(ctx)
	}
	go a.watchConnections(ctx)
	for {
		a.attend()
		a.health.idle()
		select {
		case <-ctx.Done():
			return
		case f := <-a.in.Files:
			a.health.busy()
			a.read(ctx, f)
		case err := <-a.in.Warnings:
			a.log.Warn("cannot watch the config", zap.String("event", "watch_failed"), zap.Error(err))
		case c := <-a.in.Changes:
			a.health.busy()
			a.heard(ctx, c)
		case <-a.drift.alarm.C:
			a.health.busy()
			a.compare(ctx)
		case <-a.takeOver.C:
			a.health.busy()
			a.sync(ctx, onDrift, layout.TakeOver)
		case <-a.in.Hangup:
			a.health.busy()
			a.in.Reread()
			a.sync(ctx, onHangup, layout.TakeOver)
			a.survey.at = time.Time{} // check for other programs' rules, however recent the last check was
			a.checkOthers(ctx, a.looked)
		case r := <-a.survey.results:
			a.health.busy()
			a.surveyed(ctx, r)
		case c := <-a.addresses.changes:
			a.health.busy()
			a.addressesChanged(ctx, c)
		case <-a.timer.C:
			a.health.busy()
			a.tick(ctx)
		}
	}
}

// read handles a new content of the config. An invalid one changes nothing,
// except at the start, when something must be enforced until there is a valid
// one.
func (a *Agent) read(ctx context.Context, f Files) {
	if f.large() {
		defer speedUp()()
	}
	c, warnings, err := a.compile(f)
	a.announce(c)
	a.health.config(err, warnings)
	a.logPresence(f, c)
	a.warn(warnings)
	a.content = c
	if err != nil {
		a.reject(ctx, err)
		return
	}
	a.recovered, a.rejection = a.recovered || a.rejection != nil, nil
	a.policy, a.fresh, a.tries = decide(a.policy, c, situation{}), true, 0
	if !a.health.now().wasSynced {
		a.pending = layout.TakeOver
	}
	a.sync(ctx, a.configReason(), layout.Ours)
}

// logPresence logs that the config file vanished or appeared.
func (a *Agent) logPresence(f Files, c content) {
	if f.Err != nil {
		return
	}
	before, now := a.file, !f.absent()
	a.file = &now
	switch {
	case before == nil || *before == now:
	case now:
		a.log.Info("the config file appeared", zap.String("event", "config_file_appeared"), zap.String("path", a.settings.ConfigPath))
	case c.want != nil:
		a.log.Warn("the config file vanished: the built-in defaults now apply", zap.String("event", "config_file_vanished"),
			zap.String("path", a.settings.ConfigPath), zap.String("hash", c.want.Hash()))
	}
}

// warn logs the warnings about the config, each only once while it persists.
func (a *Agent) warn(warnings []config.Problem) {
	before := a.warned
	a.warned = make(map[string]bool, len(warnings))
	for _, w := range warnings {
		text, level := w.Error(), zap.WarnLevel
		if w.Level == config.Note {
			level = zap.InfoLevel
		}
		if !before[text] {
			a.log.Log(level, "config warning", zap.String("event", "config_warning"), zap.String("warning", text))
		}
		a.warned[text] = true
	}
}

// speedUp uses a second CPU, so that probes are answered while a large config is
// processed, and relaxes garbage collection.
func speedUp() (rest func()) {
	processors, restore := runtime.GOMAXPROCS(2), relaxGC()
	return func() {
		restore()
		runtime.GOMAXPROCS(processors)
	}
}

// relaxGC allows as much garbage as live memory, until restore is called. If GOGC
// is set in the environment, it has no effect.
func relaxGC() (restore func()) {
	if os.Getenv("GOGC") != "" {
		return func() {}
	}
	garbage := debug.SetGCPercent(100)
	return func() { debug.SetGCPercent(garbage) }
}

// compile compiles a content of the config, and sets the resync interval.
func (a *Agent) compile(f Files) (content, []config.Problem, error) {
	if f.Err != nil {
		return content{}, nil, f.Err
	}
	b := nft.Build(a.settings.Defaults, a.settings.NFT(), f.Sources...)
	if err := b.Problems.Err(); err != nil {
		return content{files: f.Sources, lenient: b.Ruleset}, b.Problems.Remarks(), err
	}
	a.resync, a.staleConnections = b.Config.ResyncInterval, b.Config.StaleConnections
	return content{files: f.Sources, want: b.Ruleset, absent: f.absent()}, b.Problems.Remarks(), nil
}

func (a *Agent) configReason() string {
	if a.held == "" {
		return onStart
	}
	return onConfig
}

// announce logs once which version is starting, and its settings.
func (a *Agent) announce(c content) {
	if a.started {
		return
	}
	a.started = true
	path := a.settings.ConfigPath
	if c.absent {
		path += " does not exist: the built-in defaults apply"
	}
	where, layout := "inet "+nft.TableName, a.settings.NFT().Layout
	if chain := layout.Chain(); chain != "" {
		where = "nat, chain " + chain
	}
	a.log.Info("starting",
		zap.String("event", "starting"), zap.String("version", a.settings.Version), zap.String("path", path),
		zap.String("table", where), zap.String("mode", string(layout.Mode())))
}

// reject logs that a content is invalid and what is enforced instead.
func (a *Agent) reject(ctx context.Context, err error) {
	a.rejection = err
	if a.policy.accepted {
		a.policy = decide(a.policy, a.content, situation{})
		a.reportSource()
	} else {
		a.sync(ctx, a.configReason(), layout.Ours)
	}
	a.log.Error("config rejected; "+a.policy.words(a.held), zap.String("event", "config_rejected"),
		zap.String("source", string(a.policy.from)), zap.Error(err))
}

// reportSource reports to probes and metrics what is enforced.
func (a *Agent) reportSource() {
	a.health.set(func(s *state) { s.policy, s.words, s.addresses = a.policy, a.policy.words(a.held), a.addresses.known })
}

// rewriting is how long an older agent's rules may be missing before they count
// as removed: it may rewrite them in several steps.
const rewriting = time.Second

// reconsider decides again what to enforce while no config has been accepted,
// because the state of the node may have changed.
func (a *Agent) reconsider(ctx context.Context) error {
	n := situation{defaults: nft.Compile(config.Default(a.settings.Defaults), a.settings.NFT())}
	previous, older := a.policy.needs(a.content)
	if previous {
		left, found, err := a.kernel.Installed(ctx)
		if err != nil {
			return err
		}
		if found {
			n.previous = &left
		}
	}
	if older && n.previous == nil {
		others, err := a.kernel.Older(ctx)
		if err != nil {
			return err
		}
		n.older = a.stillThere(others)
		if a.policy.want == nil {
			a.health.found(others)
			a.logXTables(others.XTables)
		}
	}
	next := decide(a.policy, a.content, n)
	if a.policy.same(next) {
		return nil
	}
	if next.from == FromForeign && a.policy.want != nil {
		if _, err := a.kernel.Cleanup(ctx, kernel.Ours); err != nil {
			return err
		}
		a.held = ""
		a.health.set(func(s *state) { s.enforces = nil })
	}
	was := a.policy.from
	a.policy, a.fresh = next, true
	if was != "" && was != next.from {
		a.log.Warn("config still rejected; from now on "+next.words(next.hash()), zap.String("event", "config_source_changed"),
			zap.String("source", string(next.from)), zap.String("previous_source", string(was)))
	}
	return nil
}

// stillThere reports whether rules of an older agent are active. It waits before
// it reports that they are not.
func (a *Agent) stillThere(others kernel.Others) bool {
	if others.OlderAgentDecides() {
		a.withdrawn = time.Time{}
		return true
	}
	if a.policy.from != FromForeign {
		return false
	}
	if a.withdrawn.IsZero() {
		a.withdrawn = time.Now()
	}
	return time.Since(a.withdrawn) < rewriting
}

// tick handles the resync timer: the safety net for missed notifications, and the
// retry after a rejection.
func (a *Agent) tick(ctx context.Context) {
	a.in.Reread()
	if a.refused != "" {
		a.sync(ctx, onRefusal, layout.Ours)
		return
	}
	a.sync(ctx, onResync, layout.TakeOver)
	a.checkOthers(ctx, a.looked)
}

// sync brings the kernel to what is wanted. The agent writes no rules elsewhere.
func (a *Agent) sync(ctx context.Context, reason string, depth layout.Depth) {
	start := time.Now()
	defer a.reportSource()
	if !a.decided(ctx, reason, start) {
		return
	}
	if depth = max(a.survey.hold(depth), a.pending); depth == layout.TakeOver && !a.takesOver() {
		depth = layout.Everything
	}
	if depth > layout.Ours {
		defer relaxGC()()
	}
	if err := a.placeOnNode(ctx, reason == onResync || reason == onHangup); err != nil {
		a.refuse(reason, time.Since(start), err)
		return
	}
	applied, err := a.apply(ctx, depth)
	took := time.Since(start)
	a.metrics.applied(reason, len(applied.Differences) > 0, err, took)
	if err != nil {
		a.refuse(reason, took, err)
		return
	}
	o := a.progress.outcome(reason, applied, took, a.drift.names())
	a.progress = progress{held: a.policy.want.Hash(), heldPolicy: a.policy.want.Policy}
	a.plan(o, depth)
	// First the state, then the log line: a reader of the line finds us ready.
	a.health.inSync(*a.policy.want)
	a.reportChange(o)
	a.report(o)
	a.logMissing(a.policy.want.Policy)
	if o.wrote() || o.before.held == "" {
		a.policyChanged()
	}
	if o.before.fresh {
		a.survey.due = true
		a.warnOfUncovered()
	}
	if o.before.fresh || reason == onStart {
		a.checkOthers(ctx, time.Now())
	}
}

// An outcome is the result of a successful sync.
type outcome struct {
	kernel.Applied
	reason   string
	took     time.Duration // including everything that was read
	before   progress
	drift    bool   // rules changed by another program were restored
	by       string // the programs that changed them, if notified
	tookOver bool   // rules of older agents came back and were removed
}

func (p progress) outcome(reason string, applied kernel.Applied, took time.Duration, by string) outcome {
	return outcome{
		Applied: applied, reason: reason, took: took, before: p, by: by,
		drift:    len(applied.Differences) > len(applied.TookOver) && !p.fresh && !p.moved && p.held != "",
		tookOver: len(applied.TookOver) > 0 && p.pending != layout.TakeOver,
	}
}

func (o outcome) wrote() bool { return len(o.Differences) > 0 }

// plan schedules the next checks.
func (a *Agent) plan(o outcome, depth layout.Depth) {
	if o.drift || o.tookOver {
		a.restored(o.Generation)
	} else {
		a.checked(o.reason, o.took, nil, o.Generation)
	}
	a.drift.heardOf = heardOf{}
	a.planTakeOver(o.reason, depth, o.took)
	if a.looked.IsZero() || slices.Contains([]string{onStart, onResync, onHangup}, o.reason) {
		a.looked, a.lookTook = time.Now(), 0
		if !o.wrote() {
			a.lookTook = o.took
		}
	}
	a.timer.Reset(a.next())
}

// reportChange reports to probes what was changed in the kernel, and why.
func (a *Agent) reportChange(o outcome) {
	n, now, before := len(o.Differences), time.Now(), o.before.held
	if n == 0 && before == a.held {
		return
	}
	e := running.Policy{Hash: a.held, Since: now, Changed: now, Why: o.reason}
	if last := a.health.now().enforces; last != nil && before == a.held {
		e.Since = last.Since
	}
	switch {
	case o.drift:
		e.What, e.Why = fmt.Sprintf("rules restored, differences: %d", n), "changed by "+o.by
	case before == a.held && o.before.moved:
		e.What = "source addresses replaced by those that this node has"
	case before == a.held:
		e.What = fmt.Sprintf("differences removed: %d", n)
	case before != "":
		added, removed := a.heldPolicy.Beyond(o.before.heldPolicy, 0), o.before.heldPolicy.Beyond(a.heldPolicy, 0)
		e.What = fmt.Sprintf("policy %s replaced, entries added: %d, removed: %d", before, added.Count, removed.Count)
	case n == 0:
		e.What = "the rules were already in place"
	default:
		e.What = "rules installed"
	}
	a.health.set(func(s *state) { s.enforces = &e })
}

// warnOfUncovered warns about pods that the policy does not cover.
func (a *Agent) warnOfUncovered() {
	for _, why := range answer.UncoveredPods(a.policy.want.Policy, a.settings.PodCIDRs) {
		a.log.Warn("the config does not cover the pods of --pod-cidr", zap.String("event", "pod_cidr_not_covered"),
			zap.String("why", why.Error()), zap.String("hash", a.policy.want.Hash()))
	}
}

// decided reports whether there is something to enforce.
func (a *Agent) decided(ctx context.Context, reason string, start time.Time) bool {
	switch undecided := a.rejection != nil && !a.policy.accepted; {
	case undecided && a.survey.running && a.policy.want != nil:
		a.survey.held = max(a.survey.held, layout.Everything) // decide again when it has ended
	case undecided:
		if err := a.reconsider(ctx); err != nil {
			a.refuse(reason, time.Since(start), err)
			return false
		}
	}
	if a.policy.want == nil {
		a.checked(reason, time.Since(start), nil, a.drift.generation)
		a.leave()
		return false
	}
	return true
}

// leave writes nothing, because another agent's rules are active or nothing has
// been read yet.
func (a *Agent) leave() {
	if a.policy.from == "" {
		return
	}
	a.refused, a.tries, a.drift.heardOf = "", 0, heardOf{}
	a.health.set(func(s *state) { s.refusal = nil })
	next := a.resync
	if !a.withdrawn.IsZero() {
		next = rewriting
	}
	a.timer.Reset(next)
}

// takesOver reports whether the rules of older agents are removed: only once a
// config has been accepted, whose rules replace them.
func (a *Agent) takesOver() bool { return a.settings.TakeOver && a.policy.accepted }

// planTakeOver schedules the next check for rules of older agents after other
// programs' changes. The check reads everything that packets can reach in
// postrouting, so it is limited to a small share of CPU time.
func (a *Agent) planTakeOver(reason string, depth layout.Depth, cost time.Duration) {
	if !a.takesOver() {
		return
	}
	if depth == layout.TakeOver {
		a.takeOver.Stop()
		a.takeOverAt = time.Now().Add(checkShare * cost)
		return
	}
	if reason == onDrift && a.survey.held != layout.TakeOver {
		a.takeOver.Reset(time.Until(a.takeOverAt))
	}
}

// report logs what a sync came to: one line for a change, and at level debug if
// nothing changed.
func (a *Agent) report(o outcome) {
	if o.before.refused != "" {
		a.log.Info("kernel accepted the rules again", zap.String("event", "rules_accepted"))
	}
	a.logReplaced(o.Replaced)
	if o.tookOver {
		a.logTakenOver(o.Applied)
		if !o.drift {
			return
		}
	}
	if o.Recreated > 0 {
		a.log.Warn("our table could not be repaired in place and was recreated; in the meantime new connections were not masqueraded",
			zap.String("event", "table_recreated"), zap.Int64("gap_ms", o.Recreated.Milliseconds()))
	}
	if o.drift {
		a.reportDrift(o)
		return
	}
	v4, v6 := a.policy.want.CIDRs()
	fields := []zap.Field{
		zap.String("reason", o.reason), zap.String("source", string(a.policy.from)), zap.String("hash", a.held),
		zap.Int("cidrs", v4+v6), milliseconds(o.Took),
	}
	switch {
	case o.wrote() && o.before.moved && !o.before.fresh:
		a.logMoved(o.before.heldPolicy)
	case o.wrote():
		if o.before.held != "" && o.before.held != a.held {
			fields = append(fields, zap.String("from", o.before.held))
			fields = append(fields, changedEntries(o.before.heldPolicy, a.heldPolicy)...)
		}
		if len(o.TookOver) > 0 {
			fields = append(fields, zap.Strings("taken_over", o.TookOver))
		}
		if len(o.Removed) > 0 {
			fields = append(fields, zap.Strings("removed_rules", o.Removed))
		}
		a.log.Info("applied", append(fields, zap.String("event", "config_applied"))...)
	case o.before.held == "":
		a.log.Info("rules are already in place", append(fields, zap.String("event", "rules_in_place"))...)
	case o.before.recovered:
		a.log.Info("config accepted again; rules are in place", append(fields, zap.String("event", "config_accepted"))...)
	default:
		a.log.Debug("checked; rules are in place", append(fields, zap.String("event", "rules_checked"))...)
	}
}

func (a *Agent) reportDrift(o outcome) {
	a.metrics.repairs.Inc()
	a.log.Warn("rules were changed by another program; restored",
		zap.String("by", o.by), zap.Int("differences", len(o.Differences)),
		zap.Strings("what", firstFew(o.Differences)), milliseconds(o.Took), zap.String("event", "rules_restored"))
	if a.drift.pace.slowed() {
		a.log.Warn("another program keeps changing the rules; repairs are slowed down", zap.String("event", "repairs_slowed"), zap.String("by", o.by))
	}
}

// changedEntries returns fields with the list entries that a change of the policy adds and removes.
func changedEntries(before, after nft.Policy) []zap.Field {
	added, removed := after.Beyond(before, few), before.Beyond(after, few)
	return []zap.Field{
		zap.Strings("added", added.First), zap.Int("added_count", added.Count),
		zap.Strings("removed", removed.First), zap.Int("removed_count", removed.Count),
	}
}

// milliseconds returns the field for a duration.
func milliseconds(d time.Duration) zap.Field {
	return zap.Float64("duration_ms", float64(d.Microseconds())/1000)
}

// few is how many entries of a list a log line contains.
const few = 5

func firstFew(all []string) []string { return all[:min(few, len(all))] }

// refuse logs a rejection by the kernel, once until the error changes, and
// schedules the next retry. Other programs' writes do not delay it.
func (a *Agent) refuse(reason string, took time.Duration, err error) {
	a.checked(reason, took, err, 0)
	if errors.Is(err, context.Canceled) {
		return // the agent ends
	}
	if reason != onDrift || a.refused == "" {
		a.tries++
		a.timer.Reset(backoff(a.tries))
	}
	a.health.refused(err)
	if text := err.Error(); text != a.refused {
		a.refused = text
		event, what := "rules_unreadable", "cannot read nftables"
		if kernel.Refused(err) {
			event, what = "rules_rejected", "kernel rejected the rules"
		}
		if a.held != "" {
			what += "; previous rules stay"
		}
		fields := []zap.Field{zap.String("event", event), zap.Error(err)}
		if hint := kernel.Hint(err); hint != "" {
			fields = append(fields, zap.String("hint", hint))
		}
		a.log.Error(what+", retrying", fields...)
	}
}

// next returns the time until the next full check.
func (a *Agent) next() time.Duration {
	// Regardless of how often other programs write and the config changes in the
	// meantime.
	return max(0, time.Until(a.looked.Add(max(a.resync, checkShare*a.lookTook))))
}
