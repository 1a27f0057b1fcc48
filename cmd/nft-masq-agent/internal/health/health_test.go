package health

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/routes"
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
			f := Facts{Single: isMounted(path)}
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
	f := Facts{Pods: []routes.Pod{{Address: netip.MustParseAddr("10.244.1.2"), Interface: "veth1"}}}
	f.CannotRead("the interfaces", errors.New("broken"))
	n.readProc(&f) // whether the node forwards packets
	found := f.Problems(nft.Policy{})
	if len(found) != 2 || found.Worst() != config.Warning {
		t.Errorf("%v", found)
	}
	for _, p := range found {
		if p.ID != Unchecked || !strings.HasPrefix(p.Msg, "cannot read ") {
			t.Errorf("%+v", p)
		}
	}
}
