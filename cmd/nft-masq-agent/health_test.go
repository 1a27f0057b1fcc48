package main

import (
	"bufio"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/answer"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
)

// A faultyNode is a node on which a fault of testdata/faults.txt is caused.
type faultyNode struct {
	trafficNode
	situation
	d       *daemon // nil if none runs
	env     []string
	stop    func()         // stops what answers; nil if nothing does
	flags   []string       // of agent and commands
	last    netip.AddrPort // as the far end saw it
	sent    uint16         // packets whose source the far end sees
	written uint32         // the generation that "unwritten" compares
	owner   *netlink.Conn  // of a table, which goes with it
	proc    string         // in place of procfs: commands run in this process, and a stand-in for the agent; "" if not
}

// paths puts paths into a text.
func (n *faultyNode) paths(text string) string {
	if strings.Contains(text, "SET") {
		text = strings.ReplaceAll(text, "SET", n.set())
	}
	dir := filepath.Dir(n.path)
	return strings.NewReplacer("SOCKET", n.socket, "CONFIG", n.path, "DIR", dir, "SEEN", n.last.String(),
		`\n`, "\n").Replace(text)
}

// aWord is one of a line. In quotes it may have spaces.
var aWord = regexp.MustCompile(`'[^']*'|\S+`)

func split(text string) (all []string) {
	for _, word := range aWord.FindAllString(text, -1) {
		all = append(all, strings.Trim(word, "'"))
	}
	return all
}

// step does what a line says.
func (n *faultyNode) step(word, text string) {
	n.t.Helper()
	text = n.paths(text)
	switch words := split(text); word {
	case "run":
		nfttest.Run(n.t, n.NS, "", words[0], words[1:]...)
	case "foreign":
		dir := filepath.Join(root, "testdata/foreign", words[0])
		nfttest.LoadForeign(n.t, n.NS, dir, strings.NewReplacer(words[1:]...).Replace)
	case "caps":
		n.env = append(n.env, withCaps+"="+text)
	case "sysctl":
		name, value, _ := strings.Cut(text, " ")
		n.check(n.NS.Sysctl(name, value))
	case "file":
		name, content, _ := strings.Cut(text, " ")
		complete := filepath.Join(n.test().TempDir(), "file") // on a slow machine the agent would see it before its content
		n.check(os.WriteFile(complete, []byte(content), 0o644))
		n.check(os.Rename(complete, filepath.Join(filepath.Dir(n.path), name)))
	case "mount":
		source := filepath.Join(n.test().TempDir(), "source")
		n.check(os.WriteFile(source, []byte(n.config), 0o644))
		n.env = append(n.env, withMount+"="+source+":"+n.path)
	case "send":
		n.seen(netip.MustParseAddr(cmp.Or(text, "203.0.113.9")), 5001)
	case "swap":
		n.swap(text + "\n")
	case "await":
		n.d.await(text)
	case "silent":
		if n.env != nil { // such an agent cannot tell where others run
			n.d.forgive("second_agent")
		}
		n.d.forgive("node_problem") // it may look between two steps
		n.d.silent()
	case "unlogged":
		if strings.Contains(n.d.Text(), text) {
			n.t.Errorf("%q is logged", text)
		}
	case "holds":
		n.holds(wants(n.t, text, append(n.flags, n.d.args...)...))
	case "unwritten":
		now := n.generation()
		if n.written != 0 && now != n.written {
			n.t.Errorf("generation %d, was %d", now, n.written)
		}
		n.written = now
	case "own":
		family := map[string]nfnetlink.Family{"inet": nfnetlink.Inet, "ip": nfnetlink.IPv4}[words[0]]
		const owned = 2 // NFT_TABLE_F_OWNER, since Linux 5.12
		n.owner = nfttest.Own(n.t, n.NS, byte(family), words[1], owned)
	case "disown":
		n.check(n.owner.Close())
	case "proc":
		name, content, _ := strings.Cut(text, " ")
		path := filepath.Join(n.proc, name)
		n.check(os.MkdirAll(filepath.Dir(path), 0o755))
		n.check(os.WriteFile(path, []byte(content), 0o644))
	case "report":
		n.report(text)
	case "hold":
		held := nfttest.In(n.test(), n.NS, running.Lock)
		n.t.Cleanup(func() { _ = held.Close() })
	case "late":
		held := nfttest.In(n.test(), n.NS, running.Announce)
		n.t.Cleanup(func() { _ = held.Close() })
	case "sent":
		flow := nfttest.Flow{Proto: nfttest.UDP, From: n.top.Node, To: n.top.Outside, Dst: netip.MustParseAddrPort(text)}
		nfttest.MustSend(n.t, n.top, flow)
	case "exchange":
		n.check(unix.Renameat2(unix.AT_FDCWD, words[0], unix.AT_FDCWD, words[1], unix.RENAME_EXCHANGE))
	case "stop":
		n.stop()
		n.stop = nil
	case "begin":
		n.start(words)
	case "then":
		if n.proc != "" {
			n.stop = n.standIn(n.agentFlags(words))
			n.load()
			return
		}
		n.start(words)
		n.d.await("starting")
		n.d.await("config_applied")
		n.load()
	case "load":
		n.load()
	case "enforce":
		config, err := os.ReadFile(n.path)
		n.check(err)
		n.enforce(string(config), append(n.flags, words...)...)
	case "open":
		words = append(words, "1")
		times, err := strconv.Atoi(words[2])
		n.check(err)
		for range times {
			n.last = n.open(nfttest.Proto(words[0]), words[1]).Seen
		}
	case "log":
		event, says, _ := strings.Cut(text, " ")
		line := n.d.await(event)
		for _, part := range strings.Split(says, " | ") {
			part, absent := strings.CutPrefix(part, "! ")
			if strings.Contains(fmt.Sprint(line), part) == absent {
				n.t.Errorf("the agent logs %v, want %q", line, part)
			}
		}
	case "metric":
		name, value, _ := strings.Cut(text, " ")
		least, err := strconv.ParseFloat(strings.TrimSuffix(value, "+"), 64)
		n.d.until(text, func() bool {
			got := n.metric(name)
			if now, none := strconv.ParseFloat(got, 64); err == nil && none == nil && strings.HasSuffix(value, "+") {
				return now >= least
			}
			return got == value
		})
	case "signal":
		n.d.signal(unix.SignalNum("SIG" + text))
	case "assign":
		n.assign(text)
	case "fin": // a segment without a connection
		to := netip.AddrPortFrom(netip.MustParseAddr(text), 7)
		src := map[bool]netip.Addr{true: n.top.PodV4, false: n.top.PodV6}[to.Addr().Is4()]
		n.check(n.top.AddAddr(n.top.Outside, to.Addr()))
		flow := nfttest.Flow{Proto: nfttest.TCP, Flags: 1, From: n.top.Pod, Src: netip.AddrPortFrom(src, 0), Dst: to}
		n.check(flow.Emit())
	case "applied":
		n.applied(text, n.agentFlags(nil)...)
	case "visit":
		to := netip.AddrPortFrom(netip.MustParseAddr(text), 7)
		nfttest.MustSend(n.t, n.top, nfttest.Flow{Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Node, Dst: to})
	case "pod":
		n.check(n.top.AddAddr(n.top.Pod, netip.MustParseAddr(text)))
	case "sees":
		n.explainsWhatIsSeen(append(words, ""))
	}
}

// ask runs a command next to the agent, or with the file. GET asks the agent by HTTP.
func (n *faultyNode) ask(words ...string) result {
	n.t.Helper()
	if words[0] == "GET" {
		code, body := n.get(words[1])
		return result{stdout: body, code: code}
	}
	if n.stop == nil && words[0] != "cleanup" && words[0] != "ready" {
		if words = append(words, n.flags...); !slices.Contains(words, "--config") {
			words = append(words, "--config", n.path)
		}
	}
	for end := time.Now().Add(timeout); ; {
		var got result
		if n.env != nil || slices.Contains(words, "--wait-for") { // which asks from another thread
			got = n.runCommand(n.command(n.env, words...))
		} else {
			got = n.runWith(cmp.Or(n.proc, "/proc"), words...)
		}
		// Probes have a second, which a busy machine may need.
		late := words[0] == "ready" && strings.Contains(got.stdout+got.stderr, running.ErrNoAnswer.Error())
		if !late || time.Now().After(end) {
			return got
		}
	}
}

// The first line says what is wrong, the next ones what to do, and explain never the opposite of what
// the far end sees.
func TestEachFaultHasAFirstLine(t *testing.T) {
	t.Parallel()
	playOnNodes(t, "faults")
}

func TestCommandsAnswerOnANode(t *testing.T) {
	t.Parallel()
	playOnNodes(t, "node")
}

func TestCommandsAnswerNextToAStandIn(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	playOnNodes(t, "quick")
}

func TestAgentDoesWhatEachCaseSays(t *testing.T) {
	t.Parallel()
	playOnNodes(t, "daemon")
}

func playOnNodes(t *testing.T, name string) {
	t.Helper()
	all, quick := situations(t, name), name == "quick"
	if !quick && nfttest.Short() {
		quick = true
		all = slices.DeleteFunc(all, func(s situation) bool { return s.of("quick") == nil })
	}
	if len(all) == 0 {
		nfttest.SkipIfShort(t)
	}
	nfttest.Require(t, "iptables-legacy", "ip6tables-legacy", "nft", "ip")
	for _, s := range all {
		for _, mode := range modes {
			var flags []string
			if mode == nft.ModeIPTables {
				if flags = []string{"--mode=iptables-nft"}; s.of("modes") == nil {
					continue
				}
			}
			t.Run(fmt.Sprint(s.place, " ", mode), func(t *testing.T) {
				t.Parallel()
				n := &faultyNode{situation: s, flags: flags}
				if quick {
					n.proc = ownProc(t)
				}
				switch {
				case s.of("bridge") != nil:
					n.trafficNode = newBridgeNode(t)
				case s.of("uplinks") != nil:
					n.trafficNode = newTwoUplinks(t)
				default:
					n.trafficNode = newTrafficNode(t)
				}
				n.play()
			})
		}
	}
}

// start starts the agent.
func (n *faultyNode) start(flags []string) {
	n.t.Helper()
	n.d = n.startIn(n.env, n.agentFlags(flags)...)
	n.stop = func() {
		n.d.stop()
		n.d = nil
	}
	n.d.answers()
}

// agentFlags are those of the agent.
func (n *faultyNode) agentFlags(more []string) []string {
	args := append([]string{"--http-address", httpAddress}, n.flags...)
	for _, a := range n.of("agent") {
		args = append(args, split(n.paths(a))...)
	}
	return append(args, more...)
}

func (n *faultyNode) load() {
	n.t.Helper()
	rules := n.rules
	if !strings.HasPrefix(rules, "table ") {
		rules = "table ip x {\n" + rules + "}\n"
	}
	if n.rules != "" {
		n.nft(rules)
	}
}

// A question is a command, and what it prints.
type question struct {
	command, code, asked string
	next, has, lacks     []string
}

func (n *faultyNode) play() {
	n.t.Helper()
	if n.config != "" {
		n.swap(n.config)
	}
	starts := !slices.ContainsFunc(n.lines, func(line [2]string) bool {
		return slices.Contains([]string{"then", "begin", "alone"}, line[0])
	})
	q := question{command: "status"}
	for _, line := range n.lines {
		if starts && slices.Contains([]string{"$", "exit", ">", "~", "!", "sees"}, line[0]) {
			n.step("then", "")
			starts = false
		}
		switch text := line[1]; line[0] {
		case "$":
			n.answered(q)
			q = question{command: text, asked: q.asked}
		case "exit":
			q.code = text
		case ">":
			q.next = append(q.next, text)
		case "~":
			q.has = append(q.has, text)
		case "!":
			q.lacks = append(q.lacks, text)
		case "asked":
			q.asked = text
		case "agent", "alone", "modes", "bridge", "uplinks", "id", "quick": // about the whole case
		default:
			if n.answered(q) {
				q = question{command: q.command}
			}
			n.step(line[0], text)
		}
	}
	n.answered(q)
	n.hasProblem(q.command)
}

// answered compares the answer to a question, and is false if nothing is said of it.
func (n *faultyNode) answered(q question) bool {
	n.t.Helper()
	if q.next == nil && q.has == nil && q.lacks == nil && q.code == "" {
		return false
	}
	got := n.ask(split(n.paths(q.command))...)
	output := got.stdout + got.stderr
	if q.asked != "" && got.stdout != "" {
		output = got.stdout
	}
	if fmt.Sprint(got.code) != cmp.Or(q.code, "0") {
		n.t.Errorf("%s: exit code %d, want %s:\n%s", q.command, got.code, q.code, output)
	}
	rest := output
	for _, want := range q.next {
		var line string
		line, rest, _ = strings.Cut(rest, "\n")
		if !strings.HasPrefix(n.general(line), n.general(n.paths(want))) {
			n.t.Errorf("%s: the line is %q, want %q", q.command, n.general(line), want)
		}
	}
	for i, text := range append(q.has, q.lacks...) {
		if strings.Contains("\n"+unbroken(rest), n.paths(text)) != (i < len(q.has)) {
			n.t.Errorf("%s: %q has to be in the following, is %t:\n%s", q.command, n.paths(text), i < len(q.has), rest)
		}
	}
	if q.asked != "" {
		n.documented(q.asked, split(n.paths(q.command)), q.next[0])
	}
	return true
}

// unbroken is a text in which a place follows what it is about.
func unbroken(text string) string { return strings.ReplaceAll(text, "\n     (", " (") }

// hasProblem checks that status, the log and the metric have the problem.
func (n *faultyNode) hasProblem(command string) {
	n.t.Helper()
	for _, text := range n.of("id") {
		id, logs, _ := strings.Cut(text, " ")
		var r answer.Status
		n.check(json.Unmarshal([]byte(n.ask(append(strings.Fields(command), "-o", "json")...).stdout), &r))
		found := append(r.Errors, r.Warnings...)
		if len(found) == 0 || found[0].ID != id {
			n.t.Fatalf("want problem %s: %+v", id, r)
		}
		if logs == "" {
			continue
		}
		line := n.d.await("node_problem")
		if line["problem"] != id || line["level"] != "warn" || line["why"] != found[0].Error() {
			n.t.Errorf("the agent logs %v", line)
		}
		if m := n.metric(fmt.Sprintf("nft_masq_agent_node_problem{problem=%q}", id)); m != "1" {
			n.t.Errorf("the metric is %q", m)
		}
	}
}

// explainsWhatIsSeen compares explain with what the far end sees of a packet: a destination and the source. It
// may not claim otherwise.
func (n *faultyNode) explainsWhatIsSeen(words []string) {
	n.t.Helper()
	args, src := []string{"explain", words[0]}, n.top.PodV4
	to, err := netip.ParseAddrPort(words[0])
	if err != nil {
		n.sent++
		to = netip.AddrPortFrom(netip.MustParseAddr(words[0]), 5800+n.sent)
	} else {
		args = append(args, "--protocol", "udp")
	}
	if to.Addr().Is6() {
		src = n.top.PodV6
	}
	var x answer.Explanation
	got := n.ask(append(args, "--from", src.String(), "-o", "json")...)
	n.check(json.Unmarshal([]byte(got.stdout), &x))
	flow := nfttest.Flow{Proto: nfttest.UDP, From: n.top.Pod, To: n.top.Outside, Dst: to}
	sees := words[1]
	if sees == "nothing" {
		sees, flow.Timeout = "", 500*time.Millisecond // on a busy machine it sees less, not more
	}
	s, err := n.top.Send(flow)
	switch {
	case err != nil && !errors.Is(err, nfttest.ErrNotSeen):
		n.t.Fatal(err)
	case err == nil && s.Seen.Addr().String() != sees || (err != nil) != (sees == ""):
		n.t.Errorf("the far end sees %s (%v), want %q", s.Seen, err, sees)
	case contradicts(x, s.Seen.Addr()) != "":
		n.t.Errorf("the far end sees %q, but explain says %s: %s", sees, x.Sees, x.Headline)
	}
}

var (
	aPID    = regexp.MustCompile(`\bpid \d+`)
	aSource = regexp.MustCompile(`192\.0\.2\.1:\d+`)
)

// general leaves out of a line what differs from run to run.
func (n trafficNode) general(line string) string {
	line = aPID.ReplaceAllString(strings.ReplaceAll(line, n.path, "CONFIG"), "pid PID")
	return strings.ReplaceAll(strings.TrimSpace(line), filepath.Dir(n.path)+"/", "")
}

// documented fails the test unless TROUBLESHOOTING.md has a question with its answer.
func (n trafficNode) documented(asked string, args []string, first string) {
	n.t.Helper()
	quote := "`"
	if strings.Contains(first, quote) {
		quote = "``"
	}
	command := strings.ReplaceAll(n.general(strings.Join(args, " ")), " --config CONFIG", "")
	command, _, _ = strings.Cut(command, " --probe-socket")
	command = aSource.ReplaceAllString(command, "ADDRESS:PORT")
	row := fmt.Sprintf("| %s | `%s` | %s%s%s |\n", asked, command, quote, first, quote)
	if text := readDocument(n.test(), "manifests/TROUBLESHOOTING.md"); !strings.Contains(text, row) {
		n.t.Errorf("not in TROUBLESHOOTING.md:\n%s", row)
	}
}

func TestNFTMonitorAnswersWhoDeletesOurRules(t *testing.T) {
	t.Parallel()
	n := newTrafficNode(t)
	n.start().await("config_applied")
	cmd := nfttest.Command("nft", "monitor")
	out, err := cmd.StdoutPipe()
	n.check(err)
	p, err := n.Start(cmd)
	n.check(err)
	n.t.Cleanup(func() { _ = p.Kill() })
	lines := bufio.NewScanner(out)
	// A change shows that it listens.
	listening := make(chan struct{})
	go func() {
		defer close(listening)
		lines.Scan()
	}()
	for listens := false; !listens; {
		nfttest.NFT(t, n.NS, "", "add", "table", "ip", "other")
		nfttest.NFT(t, n.NS, "", "delete", "table", "ip", "other")
		select {
		case <-listening:
			listens = true
		case <-time.After(10 * time.Millisecond):
		}
	}
	deleter, err := n.Start(nfttest.Command("nft", "delete", "table", "inet", "nft-masq-agent"))
	n.check(err)
	n.check(deleter.Wait())
	deleted := false
	for lines.Scan() {
		line := lines.Text()
		deleted = deleted || line == "delete table inet nft-masq-agent"
		if deleted && strings.HasPrefix(line, "# new generation ") {
			const row = "# new generation NUMBER by process PID (nft)"
			got := regexp.MustCompile(`generation \d+ by process \d+`).ReplaceAllString(line, "generation NUMBER by process PID")
			if got != row {
				t.Errorf("%q, want %q", got, row)
			}
			n.documented("Who deletes our rules?", []string{"nft monitor"}, row)
			return
		}
	}
	t.Errorf("nft monitor ended without the deletion: %v", lines.Err())
}
