package health

import (
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
	"nft-masq-agent/nft/routes"
)

var update = flag.Bool("update", false, "regenerate testdata/nodes.txt")

// A kubelet replaces the files of a ConfigMap; a mount of one of them keeps the old one.
func TestSingleFileMountFollowsNothingOnceItsSourceIsReplaced(t *testing.T) {
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
		{"a replaced source", func() error {
			return errors.Join(os.WriteFile(source+".new", nil, 0o644), os.Rename(source+".new", source))
		}, config.Error},
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
			if found := files(path); found.Worst() != s.want || len(found) > 0 && found[0].ID != SingleFile {
				t.Errorf("%s: %v, want %s", s.name, found, s.want)
			}
		}
	}()
	<-done
}

// A row is a node, and a policy.
type row struct {
	Node
	policy nft.Policy
}

// steps are those of testdata/nodes.txt. They return what they were asked for.
var steps = map[string]func(n *row, words []string) string{
	"pods": func(n *row, list []string) string {
		n.Pods = func(ipv6 bool) (all []netip.Addr, err error) {
			for _, text := range list {
				if a := netip.MustParseAddr(text); a.Is6() == ipv6 {
					all = append(all, a)
				}
			}
			return all, nil
		}
		return ""
	},
	"links": func(n *row, list []string) string { // NAME:KIND, NAME:KIND:elsewhere or NAME:KIND:down
		n.Interfaces = func() (all []routes.Interface, err error) {
			for _, text := range list {
				words := append(strings.Split(text, ":"), "")
				all = append(all, routes.Interface{
					Name: words[0], Kind: words[1], Up: words[2] != "down", Elsewhere: words[2] == "elsewhere",
				})
			}
			return all, nil
		}
		return ""
	},
	"others": func(n *row, words []string) string {
		n.Others = func() (bool, error) {
			if words[0] == "unreadable" {
				return false, unix.EPERM
			}
			return words[0] == "yes", nil
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
		n.Stats = func() (s conntrack.Stats, err error) {
			_, err = fmt.Sscan(strings.Join(words, " "), &s.Entries, &s.Limit, &s.InsertFailed)
			return s, err
		}
		return ""
	},
	"check":    func(n *row, _ []string) string { return n.say(n.Check(n.policy, filepath.Join(n.Proc, "config"))) },
	"forwards": func(n *row, _ []string) string { return n.Forwards(n.policy) },
	"not-forwarded": func(n *row, words []string) string {
		kind := map[string]int{
			"unicast": unix.RTN_UNICAST, "broadcast": unix.RTN_BROADCAST, "multicast": unix.RTN_MULTICAST,
			"local": unix.RTN_LOCAL, "unknown": unix.RTN_UNSPEC,
		}[words[2]]
		what, remedy := NotForwarded(n.Proc, words[0], netip.MustParseAddr(words[1]), kind)
		return fmt.Sprintf("%q %q", what, remedy)
	},
	"strict": func(n *row, words []string) string {
		return n.say(StrictReplies(n.Proc, nfttest.Must(strconv.Atoi(words[0])), words[1:]))
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
		n := &row{Node: Node{
			Proc: t.TempDir(), Rules: func() ([]routes.SourceRule, error) { return nil, nil },
		}}
		for word, about := range map[string]string{"pods": "", "links": "", "others": "no", "entries": "0 0 0"} {
			steps[word](n, strings.Fields(about))
		}
		file := ""
		for _, s := range c.Steps {
			words := strings.Fields(s.Line)
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
	})
}

// Pods keep their address to what is exempt, but rules of policy routing lead them to other networks alone.
func TestRoutingRulesThatLeadPodsToLessThanWhatIsExemptAreFound(t *testing.T) {
	nfttest.Require(t, "ip")
	const vpc = "rule add priority 1536 from 10.244.1.2 to 10.244.0.0/16 lookup 2"
	const exempts = "nonMasqueradeCIDRs: [10.244.0.0/16, 172.16.0.0/12, 169.254.169.254/32]\n"
	const want = "pods keep their address to 172.16.0.0/12, but no routing rule from 10.244.1.2 leads there; " +
		"172.16.0.0/12 (config:1:37) leaves by another table than that of ip rule 1536: from 10.244.1.2/32 to " +
		"10.244.0.0/16 lookup 2; EC2 drops such packets of secondary interfaces; with AWS VPC CNI, list it in " +
		"AWS_VPC_K8S_CNI_EXCLUDE_SNAT_CIDRS, too"
	for _, tt := range []struct{ config, ip, want string }{
		{exempts, "", ""},
		{exempts, vpc, want},
		{exempts + "masqueradeSrcCIDRs: [10.244.0.0/16]", vpc, want},
		{exempts + "masqueradeSrcCIDRs: [10.245.0.0/16]", vpc, ""},
		{exempts + "forceMasqueradeCIDRs: [172.16.0.0/12]", vpc, ""},
		{"nonMasqueradeCIDRs: [10.244.0.0/16]", vpc, ""},
		{exempts, vpc + "\nrule add from 10.244.1.2 to 172.16.0.0/12 lookup 2", ""},
		{exempts, vpc + "\nrule add from 10.244.1.2 lookup 2", ""},
		{exempts, vpc + "\nrule add from 10.244.1.2 to 172.16.0.0/13 lookup 2 priority 2000", want},
		{exempts, vpc + "\nrule add from 10.244.1.3 lookup 2", want},
		{exempts, vpc + "\nrule add from 10.244.1.2 fwmark 1 lookup 2", want},
		{exempts, vpc + "\nroute add 172.16.0.0/12 dev eni1", ""},
		{exempts, strings.Replace(vpc, "lookup 2", "lookup main", 1), ""},
		{exempts, strings.Replace(vpc, "from 10.244.1.2", "not from 10.244.1.3", 1), ""},
		{exempts, strings.Replace(vpc, "10.244.1.2", "10.244.1.3", 1), ""},
	} {
		ns := nfttest.NewNode(t, "link add eni1 type veth peer name peer1\nlink set eni1 up\nlink set peer1 up\n"+
			"route add 10.244.1.2 dev eni1\nroute add default dev peer1\n"+tt.ip)
		c, problems := config.Parse(config.Defaults{}, config.Source{Name: "config", Data: []byte(tt.config)})
		n := Node{Networks: routes.Networks, Rules: routes.SourceRules}
		found := nfttest.In(t, ns, func() (config.Problems, error) {
			pods, err := routes.Pods(false)
			p := nft.NewPolicy(c, nft.Options{Layout: native.Layout{}})
			return n.routing(p, map[bool][]netip.Addr{false: pods}), errors.Join(err, problems.Err())
		})
		if got := found.Error(); got != tt.want || got != "" && found.Worst() != config.Warning {
			t.Errorf("%s%s:\n got %s\nwant %s", tt.config, tt.ip, got, tt.want)
		}
	}
}

// What cannot be read is said, and claims nothing.
func TestWhatCannotBeReadIsAProblemOfItsOwn(t *testing.T) {
	broken := errors.New("broken")
	n := Node{
		Proc:       t.TempDir(),
		Pods:       func(bool) ([]netip.Addr, error) { return nil, broken },
		Interfaces: func() ([]routes.Interface, error) { return nil, broken },
		Stats:      func() (conntrack.Stats, error) { return conntrack.Stats{}, broken },
		Rules:      func() ([]routes.SourceRule, error) { return nil, broken },
	}
	found := n.Check(nft.Policy{}, filepath.Join(n.Proc, "config"))
	if len(found) != 5 || found.Worst() != config.Warning {
		t.Errorf("%v", found)
	}
	for _, p := range found {
		if p.ID != Unchecked || !strings.HasPrefix(p.Msg, "cannot read ") {
			t.Errorf("%+v", p)
		}
	}
}
