package loop

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	captured "go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/node"
	"nft-masq-agent/nft/xtables"
)

// Play plays the scripts of a file. Each step is followed by what it leads to: lines of the log, writes, what is enforced,
// and whether the loop is ready. run makes a world for a name, and has further steps. With update, the file is written
// anew.
func Play(t *testing.T, file string, update bool, run func(t *testing.T, name string, play func(*World, Steps))) {
	script.Golden(t, file, update, func(t *testing.T, c *script.Case) {
		run(t, c.Name, func(w *World, more Steps) {
			for _, s := range c.Steps {
				s.Say(w.play(s, more))
			}
		})
	})
}

// area returns the first word of the event of a line.
func area(e captured.LoggedEntry) string {
	word, _, _ := strings.Cut(fmt.Sprint(e.ContextMap()["event"]), "_")
	return word
}

// hash matches one in a text.
var hash = regexp.MustCompile(`\b[0-9a-f]{8}\b`)

// play does a step, and returns what it leads to.
func (w *World) play(step *script.Step, more Steps) string {
	var b strings.Builder
	say := func(format string, a ...any) {
		said := strings.ReplaceAll(fmt.Sprintf(format, a...), fmt.Sprintf(`"own_pid":%d`, os.Getpid()), `"own_pid":PID`)
		text := hash.ReplaceAllStringFunc(said, func(h string) string {
			if name, ok := w.names[h]; ok {
				return "«" + name + "»"
			}
			return h
		})
		b.WriteString(strings.ReplaceAll(strings.TrimSpace(text), "\n", " / ") + "\n")
	}
	word, rest := step.Words()
	do, ok := more[word]
	if !ok {
		do, ok = steps[word]
	}
	if !ok {
		step.Unknown(w)
	}
	synctest.Wait() // for what begins with the loop
	answer := do(w, rest)
	synctest.Wait()
	lines := w.Logs.TakeAll()
	if w.Observed {
		slices.SortStableFunc(lines, func(a, b captured.LoggedEntry) int { return cmp.Compare(area(a), area(b)) })
	}
	for _, e := range lines {
		fields := e.ContextMap()
		delete(fields, "duration_ms")
		delete(fields, "version")
		if fields["reason"] == "retry" || fields["reason"] == "drift" {
			fields["reason"] = "drift or retry" // whichever is first: the time of a retry is random
		}
		text, err := json.Marshal(fields)
		nfttest.Check(err)
		say("%s: %s %s", e.Level, e.Message, text)
	}
	w.Locked(func() { // below, time may pass
		for ; w.wrote < len(w.Writes); w.wrote++ {
			say("wrote %s", w.Writes[w.wrote])
		}
	})
	state := "ready"
	if err := w.Agent.Ready(); err != nil {
		state = "not ready: " + err.Error()
	}
	for _, line := range w.Metrics("config_source") {
		if source, is := strings.CutSuffix(line, `"} 1`); is {
			state = "source " + strings.TrimPrefix(source, `config_source{source="`) + ", " + state
		}
	}
	if state != w.told {
		w.told = state
		say("%s", state)
	}
	for line := range strings.Lines(answer) {
		say("%s", line)
	}
	return b.String()
}

// give gives a content of the config to the loop, with a name for its policy.
func (w *World) give(name string, sources []config.Source, err error) {
	w.names[nft.Build(config.Defaults{}, w.Options).Ruleset.Hash()] = "defaults"
	if r := nft.Build(config.Defaults{}, w.Options, sources...).Ruleset; r != nil && w.names[r.Hash()] == "" {
		w.names[r.Hash()] = name
	}
	w.Deliver(sources, err)
}

// Steps are what happens in a script. They return what they were asked for.
type Steps map[string]func(w *World, rest string) string

var steps = Steps{
	"exempt": func(w *World, cidrs string) string { w.give(cidrs, File(cidrs), nil); return "" },
	"settle": func(w *World, _ string) string { // of which the other scripts show nothing
		w.give("10.0.0.0/8", File("10.0.0.0/8"), nil)
		synctest.Wait()
		w.Settle()
		w.Locked(func() { w.wrote = len(w.Writes) })
		return ""
	},
	"config": func(w *World, text string) string {
		text = strings.ReplaceAll(text, `\n`, "\n") + "\n"
		w.give(fmt.Sprint("config ", max(1, len(w.names))), []config.Source{{Name: "config", Data: []byte(text)}}, nil)
		return ""
	},
	"missing": func(w *World, why string) string {
		w.give("", nil, fmt.Errorf("%w: %s", config.ErrMissing, why))
		return ""
	},
	"empty":      func(w *World, _ string) string { w.give("", []config.Source{{Name: "config"}}, nil); return "" },
	"unreadable": func(w *World, why string) string { w.give("", nil, errors.New(why)); return "" },

	"hangup": func(w *World, _ string) string { w.Hangup <- unix.SIGHUP; return "" },
	"commit": func(w *World, _ string) string { w.Commit(); return "" },
	"tamper": func(w *World, _ string) string { w.Tamper(); return "" },
	"pass":   func(w *World, long string) string { w.Pass(nfttest.Must(time.ParseDuration(long))); return "" },
	"vanish": func(w *World, _ string) string { w.Locked(func() { w.Held = "" }); return "" }, // without a generation
	"next": func(w *World, rest string) string {
		long, every, _ := strings.Cut(rest, " ")
		w.Next(nfttest.Must(time.ParseDuration(long)), nfttest.Must(time.ParseDuration(every)))
		return ""
	},
	"reject": func(w *World, rest string) string {
		err := map[string]error{
			"": nil, "EPERM": unix.EPERM, "ENOMEM": unix.ENOMEM, "ENOENT": unix.ENOENT, "ERESTART": unix.ERESTART,
			"interrupted": fmt.Errorf("list elements: %w", nfnetlink.ErrReadAgain),
		}[rest[strings.LastIndex(rest, " ")+1:]]
		if strings.Contains(rest, "write ") {
			err = &nfnetlink.RejectedError{Op: nfnetlink.CreateRule, Err: err}
		}
		if strings.HasPrefix(rest, "busy ") {
			err = fmt.Errorf("%w: %w", nfnetlink.ErrBusy, err)
		}
		w.Reject(err)
		return ""
	},
	"left": func(w *World, hash string) string {
		w.Locked(func() {
			if w.Left = nil; hash != "" {
				w.Held, w.Left = hash, &nft.Installed{Layout: w.Options.Layout, Hash: hash}
			}
		})
		return ""
	},
	"older": func(w *World, what string) string { w.Locked(func() { w.Older = OlderChains(what) }); return "" },

	"addresses": func(w *World, list string) string {
		w.Locked(func() { w.Listed, w.Unlisted = cases.Addrs(strings.Fields(list)...), nil })
		return ""
	},
	"moved": func(w *World, list string) string {
		w.Locked(func() { w.Listed, w.Unlisted = cases.Addrs(strings.Fields(list)...), nil })
		w.Moves <- node.Change{Addresses: cases.Addrs(strings.Fields(list)...), At: time.Now()}
		return ""
	},
	"moved-earlier": func(w *World, list string) string { // than the addresses were listed last
		w.Moves <- node.Change{Addresses: cases.Addrs(strings.Fields(list)...), At: time.Now().Add(-time.Hour)}
		return ""
	},
	"unfollowed": func(w *World, _ string) string { w.Moves <- node.Change{Err: unix.EMFILE}; return "" },
	"unlisted":   func(w *World, _ string) string { w.Locked(func() { w.Unlisted = unix.ENOBUFS }); return "" },

	"get": func(w *World, path string) string {
		begun := time.Now()
		code, text := Get(w.T, w.Agent, path)
		return fmt.Sprintf("%d after %s: %s", code, time.Since(begun), strings.ReplaceAll(text, "\n", " / "))
	},
	"cost": func(w *World, cost string) string {
		w.Locked(func() { w.Cost = nfttest.Must(time.ParseDuration(cost)) })
		return ""
	},
	"connections": func(w *World, n string) string { // "" for an error
		if w.CountsErr = nil; n == "" {
			w.CountsErr = unix.EPERM
		} else {
			w.Counts[0].Packets = nfttest.Must(strconv.ParseUint(n, 10, 64))
		}
		return ""
	},
	"metrics": func(w *World, names string) string {
		return strings.Join(w.Metrics(strings.Fields(names)...), "\n")
	},
	"counted": func(w *World, names string) string {
		zero := func(line string) bool { return strings.HasSuffix(line, " 0") }
		return strings.Join(slices.DeleteFunc(w.Metrics(strings.Fields(names)...), zero), "\n")
	},
	"follows": func(w *World, _ string) string { return fmt.Sprintf("followed %d times", w.Follows) },
	"other": func(w *World, pid string) string {
		w.Locked(func() { w.Other = nfttest.Must(strconv.Atoi(pid)) })
		return ""
	},
	"late": func(w *World, pid string) string {
		w.Locked(func() { w.Late = nfttest.Must(strconv.Atoi(pid)) })
		return ""
	},
	"exchange": func(w *World, _ string) string { w.Locked(func() { w.Exchanged = true }); return "" },
	"counts": func(w *World, _ string) (text string) { // since the last time
		w.Locked(func() {
			text = fmt.Sprintf("%d checks, %d without elements, %d rereads", w.Looks, w.Frames, w.Rereads)
			w.Looks, w.Frames, w.Rereads = 0, 0, 0
		})
		return text
	},
}

// OlderChains returns the chains of an older agent: none, idle ones that no packet reaches, or active ones.
func OlderChains(what string) []xtables.OlderChain {
	chain := nfnetlink.Chain{Family: nfnetlink.IPv4, Table: "nat", Name: "IP-MASQ", Use: 2}
	c := xtables.OlderChain{Chain: chain, Rules: 2}
	switch what {
	case "none":
		return nil
	case "active":
		c.Use++
	}
	return []xtables.OlderChain{c}
}
