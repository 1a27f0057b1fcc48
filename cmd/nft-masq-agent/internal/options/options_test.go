package options_test

import (
	gocmp "cmp"
	"flag"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

func parseRun(t *testing.T, line string) *options.Options {
	t.Helper()
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	o := options.AddRunFlags(fs)
	if err := fs.Parse(strings.Fields(line)); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return o
}

func TestCommandLinesOfOlderAgentsKeepTheirMeaning(t *testing.T) {
	tests := []struct {
		line     string
		options  nft.Options
		defaults config.Defaults
		chain    string // "" for IP-MASQ-AGENT
	}{
		{"", nft.Options{Layout: native.Layout{}, RandomFully: true}, config.Defaults{ResyncInterval: time.Minute}, ""},
		{ // the manifest of a cloud
			"--v=2 --logtostderr=false --log_file=/dev/stdout --log_file_max_size=0 --masq-chain=IP-MASQ " +
				"--random-fully=false --nomasq-all-reserved-ranges",
			nft.Options{Layout: native.Layout{}},
			config.Defaults{AllReservedRanges: true, ResyncInterval: time.Minute},
			"IP-MASQ",
		},
		{ // one dash, and a separate value
			"-masq-chain NON-MASQUERADE-DAEMON -enable-ipv6 -resync-interval 30 -v 4",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{EnableIPv6: true, ResyncInterval: 30 * time.Second},
			"NON-MASQUERADE-DAEMON",
		},
		{
			"--to-ports 1024-29999,32768-65535 --mode iptables-nft",
			nft.Options{
				Layout: xtables.Layout{Name: "IP-MASQ-AGENT"},
				Ports:  []nft.PortRange{{Min: 1024, Max: 29999}, {Min: 32768, Max: 65535}},
			},
			config.Defaults{ResyncInterval: time.Minute},
			"",
		},
		{
			"--mode=iptables-nft --random-fully",
			nft.Options{Layout: xtables.Layout{Name: "IP-MASQ-AGENT"}, RandomFully: true},
			config.Defaults{ResyncInterval: time.Minute},
			"",
		},
		{ // every flag that only glog has
			"--log_link=/var/log --logbuflevel -1 --stderrthreshold=WARNING --vmodule=a=-1, --log_backtrace_at=a.go:0,b.go:7 " +
				"--v=99999999999",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{ResyncInterval: time.Minute},
			"",
		},
		{ // overlapping ports, and an invalid one
			"--to-ports=0-65535,1024-2047,1024-2047",
			nft.Options{
				Layout: native.Layout{}, RandomFully: true,
				Ports: []nft.PortRange{{Min: 1, Max: 65535}, {Min: 1024, Max: 2047}, {Min: 1024, Max: 2047}},
			},
			config.Defaults{ResyncInterval: time.Minute},
			"",
		},
		{
			"--resync-interval=0",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{ResyncInterval: time.Second},
			"",
		},
		{
			"--resync-interval -5",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{ResyncInterval: time.Second},
			"",
		},
		{
			"--resync-interval 9999999",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{ResyncInterval: 24 * time.Hour},
			"",
		},
		{ // a non-flag ends the flags
			"--masq-chain IP-MASQ stray --enable-ipv6",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{ResyncInterval: time.Minute},
			"IP-MASQ",
		},
		{ // every flag of klog, with the values in its documentation
			"--add_dir_header --alsologtostderr --alsologtostderrthreshold=ERROR --legacy_stderr_threshold_behavior=false " +
				"--log_backtrace_at=agent.go:17 --log_dir=/var/log --log_file=/var/log/agent --log_file_max_size=1800 " +
				"--logtostderr --one_output --skip_headers --skip_log_headers --stderrthreshold=2 --v=2 " +
				"--vmodule=recordio=2,file=1,gfs*=3",
			nft.Options{Layout: native.Layout{}, RandomFully: true},
			config.Defaults{ResyncInterval: time.Minute},
			"",
		},
	}
	for _, tt := range tests {
		o := parseRun(t, tt.line)
		tt.options.Marks = cases.Marks()
		if want := gocmp.Or(tt.chain, "IP-MASQ-AGENT"); o.Chain != want {
			t.Errorf("%q: chain %s, want %s", tt.line, o.Chain, want)
		}
		if diff := cmp.Diff(tt.options, o.NFT()); diff != "" {
			t.Errorf("%q: options (-want +got):\n%s", tt.line, diff)
		}
		if diff := cmp.Diff(tt.defaults, o.Defaults); diff != "" {
			t.Errorf("%q: defaults (-want +got):\n%s", tt.line, diff)
		}
	}
}

// As with pflag and package flag, which the older agents use.
func TestTheLastOfTwoFlagsWins(t *testing.T) {
	o := parseRun(t, "--v=2 --resync-interval=30 --random-fully=false --v=4 --resync-interval 90 --random-fully "+
		"--config a --config=b --logtostderr --logtostderr=false --pod-cidr=10.0.0.0/8 --pod-cidr=172.16.0.0/12")
	if o.Verbosity != 4 || o.ResyncInterval != 90*time.Second || !o.NFT().RandomFully || o.ConfigPath != "b" {
		t.Errorf("%+v", o)
	}
	if len(o.PodCIDRs) != 2 {
		t.Errorf("--pod-cidr, which can be repeated: %v", o.PodCIDRs)
	}
}

func TestIgnoredLogFileIsReported(t *testing.T) {
	for file, want := range map[string]string{
		"": "", "/dev/stdout": "", "/dev/stderr": "", "/dev/null": "", "/var/log/agent.log": "/var/log/agent.log",
	} {
		if got := parseRun(t, "--log_file="+file).IgnoredLogFile(); got != want {
			t.Errorf("--log_file=%s: %q, want %q", file, got, want)
		}
	}
}

func TestReinterpretedValuesAreWarnedAbout(t *testing.T) {
	for line, want := range map[string]string{
		"--to-ports=1024-2047,5000":                "",
		"--to-ports=0-65535":                       `--to-ports "0-65535": 1-65535 is used`,
		"--to-ports=5000,1024-2047,2000-3000":      `--to-ports "5000,1024-2047,2000-3000": 1024-2047 and 2000-3000 overlap; ports in both are chosen more often`,
		"--to-ports=80,80":                         `--to-ports "80,80": 80 and 80 overlap; ports in both are chosen more often`,
		"--to-ports=":                              "",
		"--resync-interval=0":                      `--resync-interval "0": is less than 1 s; 1 s is used`,
		"--resync-interval=0 --resync-interval=30": "",
		"--resync-interval=86401":                  `--resync-interval "86401": is more than 24 h; 24 h are used`,
	} {
		fs := flag.NewFlagSet("run", flag.ContinueOnError)
		options.AddRunFlags(fs)
		if err := fs.Parse(strings.Fields(line)); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		if got := strings.Join(options.Warnings(fs), "\n"); got != want {
			t.Errorf("%s: %q, want %q", line, got, want)
		}
	}
}
