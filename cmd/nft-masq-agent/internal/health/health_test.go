package health

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfnetlink"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/routes"
	"nft-masq-agent/nft/xtables"
)

var update = flag.Bool("update", false, "regenerate testdata/nodes.txt")

// A kubelet replaces the files of a ConfigMap; a mount of one of them keeps the old one.
func TestASingleFileThatIsMountedIsAProblem(t *testing.T) {
	dir := t.TempDir()
	path, source := filepath.Join(dir, "mounted"), filepath.Join(dir, "source")
	steps := []struct {
		name string
		do   func() error
		want config.Level // Note: no problem
	}{
		{
			"a file",
			func() error { return errors.Join(os.WriteFile(path, nil, 0o644), os.WriteFile(source, nil, 0o644)) },
			config.Note,
		},
		{"a mounted file", func() error { return unix.Mount(source, path, "", unix.MS_BIND, "") }, config.Error},
	}
	done := make(chan struct{})
	go func() { // on a thread that ends with its mount namespace
		defer close(done)
		runtime.LockOSThread()
		if err := errors.Join(unix.Unshare(unix.CLONE_NEWNS|unix.CLONE_FS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")); err != nil {
			t.Error(err)
			return
		}
		for _, s := range steps {
			if err := s.do(); err != nil {
				t.Error(err)
				return
			}
			f := Facts{Single: Node{Proc: dir}.Read(t.Context(), path).Single}
			if found := f.Problems(nft.Policy{}); found.Worst() != s.want || len(found) > 0 && found[0].ID != SingleFile {
				t.Errorf("%s: %v, want %s", s.name, found, s.want)
			}
		}
	}()
	<-done
}

// A row is a node, and a policy.
type row struct {
	Node
	facts  Facts // without those in procfs
	policy nft.Policy
}

// steps are those of testdata/nodes.txt. They return what they were asked for.
var steps = map[string]func(n *row, words []string) string{
	"pods": func(n *row, list []string) string { // ADDRESS, received on veth1
		n.facts.Pods = nil
		for _, text := range list {
			n.facts.Pods = append(n.facts.Pods, routes.Pod{Address: netip.MustParseAddr(text), Interface: "veth1"})
		}
		return ""
	},
	"links": func(n *row, list []string) string { // NAME, or NAME/MASTER=KIND of a part of another one
		n.facts.Links = nil
		for _, text := range list {
			name, master, _ := strings.Cut(text, "/")
			master, kind, _ := strings.Cut(master, "=")
			n.facts.Links = append(n.facts.Links, routes.Interface{Name: name, Master: master, MasterKind: kind})
		}
		return ""
	},
	"write": func(n *row, words []string) string {
		path := filepath.Join(n.Proc, words[0])
		nfttest.Check(errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(strings.Join(words[1:], " ")+"\n"), 0o644)))
		return ""
	},
	"entries": func(n *row, words []string) string {
		s := &n.facts.Tracked
		nfttest.Must(fmt.Sscan(strings.Join(words, " "), &s.Entries, &s.Limit, &s.InsertFailed))
		return ""
	},
	"check": func(n *row, _ []string) string {
		f := n.facts
		n.readProc(&f)
		return n.say(f.Problems(n.policy))
	},
	"not-forwarded": func(n *row, words []string) string {
		kind := map[string]int{
			"unicast": unix.RTN_UNICAST, "broadcast": unix.RTN_BROADCAST, "multicast": unix.RTN_MULTICAST,
			"local": unix.RTN_LOCAL, "unknown": unix.RTN_UNSPEC,
		}[words[2]]
		what, remedy := n.Forwards(words[0], netip.MustParseAddr(words[1]), kind)
		return fmt.Sprintf("%q %q", what, remedy)
	},
}

// say returns problems with all that is said about them.
func (n *row) say(all config.Problems) string {
	var b strings.Builder
	for _, p := range all {
		fmt.Fprintf(&b, "%s %s: %s\n", p.Level, p.ID, p.Error())
	}
	return strings.ReplaceAll(b.String(), n.Proc, "PROC")
}

// Each case of testdata/nodes.txt is a config, and then what a node is like, and what is asked about it.
func TestNodesAreJudgedAsTheirRowsSay(t *testing.T) {
	script.Golden(t, "testdata/nodes.txt", *update, func(t *testing.T, c *script.Case) {
		n := &row{Node: Node{Proc: t.TempDir()}}
		for word, about := range map[string]string{"pods": "", "links": "lo veth1 eth0", "entries": "0 0 0"} {
			steps[word](n, strings.Fields(about))
		}
		file := ""
		for _, s := range c.Steps {
			words := strings.Fields(strings.ReplaceAll(s.Line, `\x1b`, "\x1b"))
			step := steps[words[0]]
			if step == nil {
				file += s.Line + "\n"
				continue
			}
			b := nft.Build(config.Defaults{}, nft.Options{Layout: native.Layout{}},
				config.Source{Name: "config", Data: []byte(file)})
			n.policy = b.Ruleset.Policy
			s.Say(step(n, words[1:]))
		}
		if verb, _ := c.Last().Words(); steps[verb] == nil {
			c.Last().Unknown(t)
		}
	})
}

// What cannot be read is said, and claims nothing.
func TestWhatCannotBeReadIsAProblemOfItsOwn(t *testing.T) {
	n := Node{Proc: t.TempDir()}
	var limit unix.Rlimit // of open files
	nfttest.NoError(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	nfttest.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Max: limit.Max}))
	f := n.Read(t.Context(), n.Proc)
	nfttest.NoError(t, unix.Setrlimit(unix.RLIMIT_NOFILE, &limit))
	f.Pods = []routes.Pod{{Address: netip.MustParseAddr("10.244.1.2"), Interface: "veth1"}}
	// It is a file, and whether the node forwards packets is in another one.
	nfttest.NoError(t, os.MkdirAll(filepath.Join(n.Proc, "thread-self/net/ip_tables_names"), 0o700))
	n.readProc(&f)
	found := f.Problems(nft.Policy{})
	if len(found) != 6 || found.Worst() != config.Warning {
		t.Errorf("%v", found)
	}
	for _, p := range found {
		if p.ID != Unchecked || !strings.HasPrefix(p.Msg, "cannot read ") {
			t.Errorf("%+v", p)
		}
	}
}

func TestOnlyLegacyNATIsAProblem(t *testing.T) {
	f := Facts{Legacy: []xtables.LegacyTable{
		{Family: nfnetlink.IPv4, Table: "filter"},
		{Family: nfnetlink.IPv4, Table: "nat"},
		{Family: nfnetlink.IPv6, Table: "nat", Older: true},
	}}
	var got []string
	for _, p := range f.Problems(nft.Policy{}) {
		got = append(got, p.Msg)
	}
	nfttest.Same(t, "problems (-want +got)", []string{
		"rules in legacy ip_tables (ip nat) translate, too",
		"rules of an iptables-based agent in legacy ip_tables (ip6 nat) translate, too",
	}, got)
}

func TestFactsAreThoseOfTheNode(t *testing.T) {
	t.Parallel()
	top := nfttest.NewTopology(t)
	n := Node{Proc: t.TempDir()}
	write := func(name, text string) {
		path := filepath.Join(n.Proc, name)
		nfttest.NoError(t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)))
	}
	write("sys/net/ipv4/ip_forward", "0")
	write("sys/net/netfilter/nf_conntrack_udp_timeout", "5")
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	nfttest.In(t, top.Node, func() (any, error) {
		var links, pods []string
		f := n.Read(t.Context(), n.Proc)
		for _, link := range f.Links {
			links = append(links, link.Name)
			if link.Kind != "veth" {
				continue
			}
			write("sys/net/ipv4/conf/"+link.Name+"/forwarding", "0")
		}
		off := n.Read(t.Context(), n.Proc)
		for _, pod := range f.Pods {
			pods = append(pods, pod.Address.String())
		}
		if len(links) < 3 || f.Tracked.Limit == 0 || f.Single || len(f.Timeouts) != 4 || len(f.unread) > 0 ||
			len(f.NotForwarding) > 0 || len(off.NotForwarding) == 0 || off.NotForwarding[0].IPv6 ||
			!slices.Contains(pods, top.PodV4.String()) || !slices.Contains(pods, top.PodV6.String()) {
			t.Errorf("%+v\n%+v", f, off)
		}
		runtime.LockOSThread() // capabilities are per thread; this one ends
		head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var caps [2]unix.CapUserData
		nfttest.Check(unix.Capset(&head, &caps[0]))
		if less := n.Read(t.Context(), n.Proc); len(less.unread) != 1 || len(less.Pods) != len(f.Pods) {
			t.Errorf("without a capability: %+v", less)
		}
		if none := n.Read(ended, n.Proc); len(none.Pods) > 0 || len(none.Links) > 0 {
			t.Errorf("after the end: %+v", none)
		}
		return nil, nil
	})
}
