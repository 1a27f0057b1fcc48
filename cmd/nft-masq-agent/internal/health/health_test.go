package health

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/conntrack"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/routes"
)

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

func TestFullConnectionTrackingAndFailedInsertsAreFound(t *testing.T) {
	var stats conntrack.Stats
	n := Node{Stats: func() (conntrack.Stats, error) { return stats, nil }}
	for _, tt := range []struct {
		stats conntrack.Stats
		want  string
	}{
		{conntrack.Stats{Entries: 89, Limit: 100, InsertFailed: 7}, ""},
		{
			conntrack.Stats{Entries: 90, Limit: 100, InsertFailed: 7},
			"new connections fail, or will: 90 of 100 connections are tracked",
		},
		{conntrack.Stats{Entries: 5, Limit: 100, InsertFailed: 9}, "2 new connections failed since the last check"},
		{conntrack.Stats{Entries: 5, InsertFailed: 9}, ""}, // before Linux 4.19 there is no limit to read
	} {
		stats = tt.stats
		if got := n.conntrack().Error(); !strings.HasPrefix(got, tt.want) || (got == "") != (tt.want == "") {
			t.Errorf("%+v: %q, want %q", tt.stats, got, tt.want)
		}
	}
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
