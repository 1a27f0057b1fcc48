package agent

import (
	"context"
	"net/http"
	"time"

	"go.uber.org/zap/zapcore"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// An Observer reports what concerns our rules: in the log and in metrics. It runs on a
// goroutine of its own, sees what the loop publishes, and the loop does not know of it.
type Observer interface {
	Run(ctx context.Context)
	Collect(e Exporter)
}

// A View is what an observer sees of the loop.
type View struct {
	Want      *nft.Ruleset // nil: nothing is to be written
	Installed *nft.Ruleset // what the kernel accepted last, nil for nothing yet
	Replaced  *nft.Ruleset // what it accepted before the last change of our rules, nil for nothing
	InForce   bool         // Want and Installed are the same, and in the kernel, as far as is known
	Pending   bool         // Want was decided just now, and is being written: no pass begins
	Accepted  bool         // Want comes from an accepted config
	Stale     config.Stale // which connections that config deletes when they are stale
	TakesOver bool         // rules of older agents are removed

	Generation uint32 // of the ruleset, at which everything was right; 0: unknown
	Changes    int    // number of changes of our rules by this agent
	Repairs    int    // number of changes that others had made, and this agent reverted
	Hangups    int    // number of SIGHUPs
}

// Observe adds observers. It must be called before Run.
func (a *Agent) Observe(observers ...Observer) { a.observers = append(a.observers, observers...) }

func (a *Agent) seen(v view) View {
	return View{
		Want: v.policy.want, Installed: v.installed, Replaced: v.replaced, InForce: v.inForce(), Pending: v.pending(),
		Accepted: v.policy.accepted,
		Stale:    v.policy.content.stale, TakesOver: a.takesOver(v),
		Generation: v.generation, Changes: v.changes, Repairs: v.repairs, Hangups: v.hangups,
	}
}

// Current returns the last view.
func (a *Agent) Current() View { return a.seen(a.current()) }

// EachView calls handle for the published view and for each later one until ctx is done, and tells it whether a start,
// a resync or a SIGHUP succeeded since the last call. A slow observer sees only the last view.
func (a *Agent) EachView(ctx context.Context, handle func(v View, resynced bool)) {
	var last time.Time
	for ctx.Err() == nil {
		p := a.published.Load()
		handle(a.seen(p.view), p.resynced != last)
		last = p.resynced
		select {
		case <-p.outdated:
		case <-ctx.Done():
		}
	}
}

// WithPolicy returns a context for a pass of an observer that has seen a view. It ends when the loop decides another
// policy, to which the pass gives way.
func (a *Agent) WithPolicy(ctx context.Context, seen View) (context.Context, context.CancelFunc) {
	this, cancel := context.WithCancel(ctx)
	go func() {
		defer cancel()
		for p := a.published.Load(); p.policy.same(seen.Want); p = a.published.Load() {
			select {
			case <-p.outdated:
			case <-this.Done():
				return
			}
		}
	}()
	return this, cancel
}

// Log logs a line; fields are names and values in turn.
func (a *Agent) Log(level zapcore.Level, event, text string, fields ...any) {
	a.log.Logw(level, text, append(fields, "event", event)...)
}

// ServeOnSocket adds a handler for commands. It must be called before SocketHandler.
func (a *Agent) ServeOnSocket(pattern string, h http.Handler) {
	if a.served == nil {
		a.served = map[string]http.Handler{}
	}
	a.served[pattern] = h
}

// SetProblems sets the source of the problems of the last minute, which are in the agent's report. Without it there are
// none.
func (a *Agent) SetProblems(problems func() config.Problems) { a.problems = problems }

func (a *Agent) currentProblems() config.Problems {
	if a.problems == nil {
		return nil
	}
	return a.problems()
}
