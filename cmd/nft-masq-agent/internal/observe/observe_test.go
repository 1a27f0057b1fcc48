package observe

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/judge"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/loop"
	"nft-masq-agent/nft/xtables"
)

var update = flag.Bool("update", false, "regenerate testdata/observers.txt")

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// A world is one with an agent and its observers, and is their node.
type world struct {
	*loop.World
	agent *agent.Agent
	all   []agent.Observer

	older     []xtables.OlderChain
	xtables   []xtables.LegacyTable
	hidden    error    // why they cannot be read
	search    task     // for older agents
	searching int      // searches that are running
	passes    []string // what each pass does: LISTED:DELETED:ERROR, -1 if it lists none; without, it does not end
	evidence  conntrack.Evidence
	gathering task  // of evidence
	notes     int   // times
	unread    error // why they cannot be read
	problems  config.Problems
	look      task // at the node
}

// A task is what an observer does again and again.
type task struct {
	cost  time.Duration // how long one pass takes
	begun int           // passes
	ended int           // passes that were not complete
}

// inBubble runs the loop; test runs while the loop waits for events.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	w := &world{evidence: conntrack.Evidence{
		Counts:    []conntrack.Count{{Entry: judge.Entry{Verdict: nft.Masqueraded}, Agrees: 7}},
		NotJudged: map[string]int{"node": 2},
		Fullest:   conntrack.PortUse{PortKey: conntrack.PortKey{Among: judge.PortScope{Ports: 100}}, Used: 50},
	}}
	loop.Run(t, func(n *loop.World, log *zap.Logger) loop.Agent {
		w.World, n.Observed = n, true
		o := cli.Options{Mode: nft.ModeNFTables}
		files := make(chan agent.Files)
		n.Options, n.Deliver = o.NFT(), func(s []config.Source, err error) { files <- agent.Files{Sources: s, Err: err} }
		w.agent = agent.New(agent.Inputs{
			Files: files, Hangup: n.Hangup, Reread: n.Reread, Generation: n.Generation,
			Processor: func() time.Duration { return 0 }, Lock: n.Lock, Announce: n.Lock, Holder: n.Holder,
			Announced: n.Latecomer,
		}, n, agent.Settings{NFT: o.NFT(), LostLines: func() uint64 { return 0 }}, log)
		w.all = All(w.agent, w, o, w.check)
		w.agent.Observe(w.all...)
		return w.agent
	}, func(*loop.World) { test(w.T, w) })
}

func (w *world) LegacyTables() (found []xtables.LegacyTable, err error) {
	w.Locked(func() {
		found = w.xtables
		err = w.hidden
	})
	return found, err
}

func (w *world) Stats() (s conntrack.Stats, err error) {
	w.Locked(func() { err = w.unread })
	return conntrack.Stats{Entries: 7, Limit: 1000, InsertFailed: 3, Drop: 2}, err
}

func (w *world) Note(ctx context.Context, _ nft.Policy) (earlier map[uint32]bool, full bool, err error) {
	w.Locked(func() {
		w.notes++
		err = w.unread
	})
	return map[uint32]bool{7: true, 8: true}, true, errors.Join(ctx.Err(), err)
}

func (w *world) Gather(ctx context.Context, _ nft.Policy, _ conntrack.History) (e conntrack.Evidence, err error) {
	w.Locked(func() {
		e = w.evidence
		err = w.unread
	})
	w.pass(ctx, &w.gathering)
	return e, errors.Join(ctx.Err(), err)
}

func (w *world) Flush(ctx context.Context, _, _ nft.Policy, _ config.Stale) (deleted int, err error) {
	pass := "1:canceled"
	w.Locked(func() {
		if len(w.passes) > 0 {
			pass, w.passes = w.passes[0], w.passes[1:]
		}
	})
	number, failure, _ := strings.Cut(pass, ":")
	deleted = nfttest.Must(strconv.Atoi(number))
	switch failure {
	case "":
	case "canceled":
		<-ctx.Done()
		err = ctx.Err()
	default:
		err = errors.New(failure)
	}
	return deleted, err
}

func (w *world) Older(ctx context.Context, _ nft.Ruleset) (found []xtables.OlderChain, err error) {
	w.Locked(func() {
		w.searching++
		found = w.older
		if w.searching > 1 {
			found = loop.OlderChains("idle") // as seen in the log
		}
	})
	complete := w.pass(ctx, &w.search)
	w.Locked(func() {
		w.searching--
		err = w.Rejects
	})
	if !complete {
		return nil, ctx.Err()
	}
	return found, err
}

// pass is a pass of an observer, which takes some time. It reports whether it was complete.
func (w *world) pass(ctx context.Context, t *task) (complete bool) {
	var cost time.Duration
	w.Locked(func() {
		t.begun++
		cost = t.cost
	})
	if agent.Wait(ctx, cost) {
		return true
	}
	w.Locked(func() { t.ended++ })
	return false
}

// check looks at the node.
func (w *world) check(ctx context.Context, _ nft.Policy) (found config.Problems) {
	w.Locked(func() { found = w.problems })
	w.pass(ctx, &w.look)
	return found
}

func (w *world) scrape() string {
	_, text := loop.Get(w.T, w.agent, "/metrics")
	return text
}

var errnos = map[string]error{"EPERM": unix.EPERM, "ENXIO": unix.ENXIO}

// steps are those about other programs and the node.
func (w *world) steps() loop.Steps {
	set := func(use func(rest string)) func(*loop.World, string) string {
		return func(_ *loop.World, rest string) string {
			w.Locked(func() { use(rest) })
			return ""
		}
	}
	return loop.Steps{
		"legacy": set(func(what string) {
			w.older = loop.OlderChains(what)
			if what == "doubtful" {
				w.older[0].Doubt = "a rule of it is unusual"
			}
		}),
		"takeover": set(func(string) { w.all[0].(*olderAgents).o.TakeOver = true }),
		"tables": set(func(list string) {
			w.xtables = nil
			w.hidden = errnos[list]
			for table := range strings.FieldsSeq(list) {
				w.xtables = append(w.xtables, xtables.LegacyTable{Family: nfnetlink.IPv4, Table: table, Older: true})
			}
		}),
		"passes":      set(func(list string) { w.passes = strings.Fields(list) }),
		"evidence":    set(w.show),
		"search-cost": set(func(cost string) { w.search.cost = nfttest.Must(time.ParseDuration(cost)) }),
		"unread":      set(func(why string) { w.unread = errnos[why] }),
		"problems": set(func(list string) {
			w.problems = nil
			for id := range strings.FieldsSeq(list) {
				w.problems = append(w.problems, config.Problem{ID: id, Level: config.Error, Msg: "something about it"})
			}
		}),
		"known": func(*loop.World, string) string { return w.agent.Report().Problems.Error() },
		"ask":   func(*loop.World, string) string { return w.ask() },
		"observed": func(*loop.World, string) (text string) { // since the start
			w.Locked(func() {
				text = fmt.Sprintf("%d searches, %d checks of more than our rules, connections noted %d times, "+
					"evidence gathered %d times", w.search.begun, w.Deep, w.notes, w.gathering.begun)
			})
			return text
		},
	}
}

// show makes the node have evidence: CIDR:OVERRULED:STALE of nonMasqueradeCIDRs, silent:ADDRESS, or uplink.
func (w *world) show(list string) {
	w.evidence.Counts = w.evidence.Counts[:0:0]
	w.evidence.Unanswered = nil
	for text := range strings.FieldsSeq(list) {
		what, number, _ := strings.Cut(text, ":")
		if what == "uplink" {
			w.evidence.Unanswered = []conntrack.Unanswered{{Entry: judge.Entry{Verdict: nft.Masqueraded}, Silent: 12}}
			continue
		}
		if what == "silent" {
			entry := judge.Entry{Key: config.KeyNonMasqueradeCIDRs, Verdict: nft.Exempt}
			u := conntrack.Unanswered{Entry: entry, To: netip.MustParseAddr(number), Answered: 1, Silent: 19}
			w.evidence.Unanswered = append(w.evidence.Unanswered, u)
			continue
		}
		overruled, stale, _ := strings.Cut(number, ":")
		c := conntrack.Count{
			Entry:     judge.Entry{Key: config.KeyNonMasqueradeCIDRs, CIDR: netip.MustParsePrefix(what), Verdict: nft.Exempt},
			Agrees:    1,
			Overruled: nfttest.Must(strconv.Atoi(overruled)),
			Stale:     nfttest.Must(strconv.Atoi(stale)),
			Examples: []conntrack.Example{{Entry: conntrack.Entry{Key: conntrack.Key{
				Original: conntrack.Tuple{Src: netip.MustParseAddrPort("10.244.1.2:4000"), Protocol: unix.IPPROTO_UDP},
				Reply: conntrack.Tuple{
					Src: netip.MustParseAddrPort("10.9.0.9:53"), Dst: netip.MustParseAddrPort("192.0.2.1:1024"),
				},
			}}}},
		}
		w.evidence.Counts = append(w.evidence.Counts, c)
	}
}

// ask asks for the history as a command does.
func (w *world) ask() string {
	r := httptest.NewRecorder()
	w.agent.SocketHandler().ServeHTTP(r, httptest.NewRequestWithContext(w.T.Context(), http.MethodGet, HistoryPath, nil))
	text := r.Body.String()
	if r.Code != http.StatusOK {
		return fmt.Sprint(r.Code, " ", text)
	}
	var h conntrack.History
	nfttest.Check(json.Unmarshal([]byte(text), &h))
	return fmt.Sprintf("since %t, at the start %t, %d noted, incomplete %t, %d recently overruled", !h.Since.IsZero(),
		h.AtStart, len(h.Earlier), h.Incomplete, len(h.Recent))
}

func TestObserversDoWhatTheirScriptsSay(t *testing.T) {
	loop.Play(t, "testdata/observers.txt", *update, func(t *testing.T, _ string, play func(*loop.World, loop.Steps)) {
		inBubble(t, func(_ *testing.T, w *world) { play(w.World, w.steps()) })
	})
}

// own returns the metrics without those of Go and the process, with their labels.
func own(w *world) map[string][]string {
	text, all := w.scrape(), map[string][]string{}
	for _, m := range regexp.MustCompile("(?m)^# TYPE "+loop.MetricPrefix+"([a-z_]+) ").FindAllStringSubmatch(text, -1) {
		name := loop.MetricPrefix + m[1]
		all[name] = nil
		sample := regexp.MustCompile("(?m)^" + name + `\{(.*)\} `).FindStringSubmatch(text)
		if sample == nil {
			continue
		}
		for _, label := range regexp.MustCompile(`([a-z_]+)="`).FindAllStringSubmatch(sample[1], -1) {
			all[name] = append(all[name], label[1])
		}
	}
	return all
}

func TestMetricsAreLintClean(t *testing.T) {
	inBubble(t, func(t *testing.T, w *world) {
		w.Gets("10.0.0.0/8")
		problems, err := promlint.New(strings.NewReader(w.scrape())).Lint()
		nfttest.NoError(t, err)
		for _, p := range problems {
			if strings.HasPrefix(p.Metric, loop.MetricPrefix) {
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	})
}

func TestReadmeOfTheManifestsListsTheMetrics(t *testing.T) {
	text, err := os.ReadFile("../../../../manifests/README.md")
	nfttest.NoError(t, err)
	_, table, found := strings.Cut(string(text), "<!-- metrics -->")
	table, _, ended := strings.Cut(table, "<!-- /metrics -->")
	if !found || !ended {
		t.Fatal("manifests/README.md has no section metrics")
	}
	listed := map[string][]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| `([a-z_]+)(?:\\{([a-z,]+)\\})?` \\|").FindAllStringSubmatch(table,
		-1) {
		var labels []string
		if row[2] != "" {
			labels = strings.Split(row[2], ",")
			slices.Sort(labels)
		}
		listed[row[1]] = labels
	}
	files := append(nfttest.Must(filepath.Glob("*.go")), nfttest.Must(filepath.Glob("../agent/*.go"))...)
	for _, file := range files { // also what is exported only at times
		source := string(nfttest.Must(os.ReadFile(file)))
		for _, m := range regexp.MustCompile(`\.(?:Gauge|Counter)\("([a-z_]+)"`).FindAllStringSubmatch(source, -1) {
			if _, found := listed[loop.MetricPrefix+m[1]]; !found {
				t.Errorf("the section metrics of manifests/README.md does not list %s of %s", loop.MetricPrefix+m[1], file)
			}
		}
	}
	inBubble(t, func(t *testing.T, w *world) {
		w.Gets("10.0.0.0/8")
		nfttest.Same(t, "metrics of this node (-program +manifests/README.md)", own(w), listed)
	})
}
