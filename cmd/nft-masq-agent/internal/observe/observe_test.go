package observe

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/agent"
	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/neighbors"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/loop"
	"nft-masq-agent/nft/older"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/trace"
)

var update = flag.Bool("update", false, "regenerate testdata/observers.txt")

func TestMain(m *testing.M) { os.Exit(nfttest.Main(m)) }

// A world is one with an agent and its observers, and is their node.
type world struct {
	*loop.World
	agent *agent.Agent
	all   []agent.Observer

	others     neighbors.Others
	handle     uint64        // of a rule
	surveys    int           // that began
	surveying  int           // that are running
	surveyCost time.Duration // how long one takes
	interfaces []routes.Interface
	passes     []string      // what each pass does: LISTED:DELETED:ERROR, -1 if it lists none; without, it does not end
	spared     []string      // reasons
	stale      int           // connections
	recounts   int           // of them
	readings   int           // of all connections
	reading    time.Duration // how long one takes
	unread     error         // why they cannot be read
	problems   config.Problems
}

// inBubble runs the loop; test runs while the loop waits for events.
func inBubble(t *testing.T, test func(t *testing.T, w *world)) {
	t.Helper()
	w := &world{}
	loop.Run(t, func(n *loop.World, log *zap.Logger) loop.Agent {
		w.World, n.Observed = n, true
		o := options.Options{Mode: nft.ModeNFTables, ConntrackInterval: time.Minute}
		files := make(chan agent.Files)
		n.Options, n.Deliver = o.NFT(), func(s []config.Source, err error) { files <- agent.Files{Sources: s, Err: err} }
		w.agent = agent.New(agent.Inputs{
			Files: files, Hangup: n.Hangup, Reread: n.Reread, Generation: n.Generation,
			Processor: func() time.Duration { return 0 }, Lock: n.Lock, Later: n.Lock, Holder: n.Holder,
			Latecomer: n.Latecomer,
		}, n, agent.Settings{NFT: o.NFT(), LostLines: func() uint64 { return 0 }}, log)
		w.all = All(w.agent, w, o, func(nft.Policy) (found config.Problems) {
			w.Locked(func() { found = w.problems })
			return found
		})
		w.agent.Observe(w.all...)
		return w.agent
	}, func(*loop.World) { test(w.T, w) })
}

func (w *world) Interfaces() (all []routes.Interface, err error) {
	w.Locked(func() { all = w.interfaces })
	return all, nil
}

func (w *world) XTables() (found []older.XTable, err error) {
	w.Locked(func() { found = w.others.XTables })
	return found, nil
}

func (w *world) Pressure(conntrack.Ports) (conntrack.Pressure, error) {
	var long time.Duration
	var err error
	w.Locked(func() { w.readings, long, err = w.readings+1, w.reading, w.unread })
	time.Sleep(long)
	return conntrack.Pressure{
		Stats:   conntrack.Stats{Entries: 7, Limit: 1000, InsertFailed: 3, Drop: 2},
		Fullest: map[conntrack.PortGroup]float64{{Protocol: unix.IPPROTO_UDP}: 0.5},
	}, err
}

func (w *world) Stale(ctx context.Context, _ nft.Ruleset) (s conntrack.Stale, err error) {
	if err := ctx.Err(); err != nil {
		return s, err
	}
	w.Locked(func() { w.recounts, s.Count, err = w.recounts+1, w.stale, w.unread })
	return s, err
}

func (w *world) Flush(_ nft.Ruleset, _ config.Stale, list func(int, *conntrack.Judge)) Flush {
	return func(ctx context.Context) (deleted int, err error) {
		is := "5:1:canceled"
		w.Locked(func() {
			if len(w.passes) > 0 {
				is, w.passes = w.passes[0], w.passes[1:]
			}
		})
		words := strings.Split(is, ":")
		if listed := nfttest.Must(strconv.Atoi(words[0])); listed >= 0 {
			list(listed, &conntrack.Judge{Beside: conntrack.Beside{Spared: w.spared}})
		}
		switch words[2] {
		case "":
		case "canceled":
			<-ctx.Done()
			err = ctx.Err()
		default:
			err = errors.New(words[2])
		}
		return nfttest.Must(strconv.Atoi(words[1])), err
	}
}

func (w *world) Others(_ context.Context, _ nft.Ruleset) (others neighbors.Others, err error) {
	var cost time.Duration
	w.Locked(func() {
		w.surveys++
		w.surveying++
		others, cost = w.others, w.surveyCost
		if w.surveying > 1 {
			others = neighbors.Others{Unread: w.surveying} // as seen in the log
		}
	})
	time.Sleep(cost)
	w.Locked(func() { w.surveying, err = w.surveying-1, w.Refuses })
	return others, err
}

func (w *world) scrape() string {
	_, text := loop.Get(w.T, w.agent, "/metrics")
	return text
}

// steps are those about other programs and the node.
func (w *world) steps() loop.Steps {
	set := func(use func(rest string)) func(*loop.World, string) string {
		return func(_ *loop.World, rest string) string {
			w.Locked(func() { use(rest) })
			return ""
		}
	}
	return loop.Steps{
		"legacy":      set(func(what string) { w.others.Legacy = loop.OlderChains(what) }),
		"conflicts":   set(w.conflict),
		"passes":      set(func(list string) { w.passes = strings.Fields(list) }),
		"spared":      set(func(reason string) { w.spared = []string{reason} }),
		"unexamined":  set(func(n string) { w.others.Unread = nfttest.Must(strconv.Atoi(n)) }),
		"survey-cost": set(func(cost string) { w.surveyCost = nfttest.Must(time.ParseDuration(cost)) }),
		"interfaces":  set(func(list string) { w.interfaces = interfacesOf(list) }),
		"unread":      set(func(why string) { w.unread = map[string]error{"EPERM": unix.EPERM, "ENXIO": unix.ENXIO}[why] }),
		"problems": set(func(list string) {
			w.problems = nil
			for id := range strings.FieldsSeq(list) {
				w.problems = append(w.problems, config.Problem{ID: id, Level: config.Error, Msg: "something about it"})
			}
		}),
		"known": func(*loop.World, string) string { return w.agent.Report().Problems.Error() },
		"stale": set(func(n string) { w.stale = nfttest.Must(strconv.Atoi(n)) }),
		"observed": func(*loop.World, string) (text string) { // since the start
			w.Locked(func() {
				text = fmt.Sprintf("%d surveys, %d checks of more than our rules, stale connections counted %d times", w.surveys,
					w.Deep, w.recounts)
			})
			return text
		},
	}
}

// conflict makes other programs have rules that masquerade: each of a list is TABLE:NUMBER, or TABLE:NUMBER:CONDITION.
func (w *world) conflict(list string) {
	w.others.Conflicts = nil
	for text := range strings.FieldsSeq(list) {
		table, rest, _ := strings.Cut(text, ":")
		number, condition, open := strings.Cut(rest, ":")
		for i := range nfttest.Must(strconv.Atoi(number)) {
			w.handle++ // is another one each time
			f := trace.Finding{
				Rule: nfnetlink.Rule{Table: table, Chain: fmt.Sprint("CNI-", i), Handle: w.handle},
				Base: &trace.Chain{Chain: nfnetlink.Chain{Name: fmt.Sprint("base-", i), Hook: &nfnetlink.Hook{}}},
			}
			if open {
				f.Open = []string{condition}
			}
			w.others.Conflicts = append(w.others.Conflicts, neighbors.Conflict{Finding: f})
		}
	}
}

// interfacesOf are those with these names; with "=", after which is the bridge of a port.
func interfacesOf(list string) (all []routes.Interface) {
	for name := range strings.FieldsSeq(list) {
		name, master, port := strings.Cut(name, "=")
		i := routes.Interface{Name: name, Master: master}
		if port {
			i.MasterKind = "bridge"
		}
		all = append(all, i)
	}
	return all
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
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range problems {
			if strings.HasPrefix(p.Metric, loop.MetricPrefix) {
				t.Errorf("%s: %s", p.Metric, p.Text)
			}
		}
	})
}

func TestReadmeOfTheManifestsListsTheMetrics(t *testing.T) {
	text, err := os.ReadFile("../../../../manifests/README.md")
	if err != nil {
		t.Fatal(err)
	}
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
	inBubble(t, func(t *testing.T, w *world) {
		w.Gets("10.0.0.0/8")
		if diff := cmp.Diff(own(w), listed); diff != "" {
			t.Errorf("metrics (-program +README):\n%s", diff)
		}
	})
}
