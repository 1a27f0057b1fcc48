package cli_test

import (
	"flag"
	"fmt"
	"io"
	"strings"
	"testing"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

var update = flag.Bool("update", false, "regenerate testdata/lines.txt")

// testdata/lines.txt has command lines, most of them of older agents, and what they mean.
func TestCommandLinesOfOlderAgentsKeepTheirMeaning(t *testing.T) {
	script.Golden(t, "testdata/lines.txt", *update, func(t *testing.T, c *script.Case) {
		fs := flag.NewFlagSet("run", flag.ContinueOnError)
		o := cli.AddRunFlags(fs)
		nfttest.NoError(t, fs.Parse(strings.Fields(c.Text())))
		n := o.NFT()
		said := fmt.Sprintf("mode %s, random %t, ports %v, marks %+v, %+v\n", n.Layout.Mode(),
			n.RandomFully, n.Ports, n.Marks, o.Defaults)
		said += fmt.Sprintf("config %s, verbosity %d\n", o.ConfigPath, o.Verbosity)
		c.Last().Say(said + strings.Join(cli.Warnings(fs), "\n"))
	})
}

// Each wrong value of a flag is an error that says what would be right.
func TestWrongValuesSayWhatWouldBeRight(t *testing.T) {
	for arg, want := range map[string]string{
		"--config=":                    "is empty",
		"--mode=iptables":              "must be nftables or iptables-nft",
		"--log-format=JSON":            "must be json or text",
		"--random-fully=perhaps":       "is neither true nor false",
		"--resync-interval=x":          "is not a whole number of seconds",
		"--resync-interval=90s":        "is not a whole number of seconds",
		"--resync-interval=1s":         "is not a whole number of seconds",
		"--http-address=9717":          "is not a HOST:PORT",
		"--http-address=:65536":        `has port "65536"`,
		"--http-address=a b:1":         `has "a b", which is not a host`,
		"--probe-socket=/" + long(107): "is 108 bytes long",
		"--masquerade-marks=x":         `"x" is not a mark such as 0x4000/0x4000`,
		"--masq-chain=" + long(29):     "has 29 characters, iptables takes at most 28",
		"--v=high":                     "invalid syntax",
	} {
		_, _, err := parsed(arg)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", arg, err, want)
		}
	}
	for _, arg := range []string{
		"--http-address=", "--http-address=:0", "--probe-socket=/" + long(106), "--random-fully",
	} {
		if _, fs, err := parsed(arg); err != nil || cli.Warnings(fs) != nil {
			t.Errorf("%s: %v, %q", arg, err, cli.Warnings(fs))
		}
	}
}

func long(n int) string { return strings.Repeat("x", n) }

// parsed parses the arguments of run.
func parsed(args ...string) (*cli.Options, *flag.FlagSet, error) {
	fs := flag.NewFlagSet("run", flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	o := cli.AddRunFlags(fs)
	_, err := cli.Parse(fs, args)
	return o, fs, err
}

// parsedCheck parses the command line of check.
func parsedCheck(t *testing.T, line string) (o *cli.Options, operands []string) {
	t.Helper()
	fs := flag.NewFlagSet("check", flag.ContinueOnError)
	o = cli.AddPolicyFlags(fs)
	operands, err := cli.Parse(fs, strings.Fields(line))
	if err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return o, operands
}

func TestValuesOfRunAreThoseOfItsFlags(t *testing.T) {
	o, _, err := parsed("--takeover", "--http-address=:1", "--probe-socket=/s",
		"--log-format=text")
	if err != nil {
		t.Fatal(err)
	}
	got := strings.TrimSpace(fmt.Sprintln(o.TakeOver, o.HTTPAddress, o.ProbeSocket, o.LogFormat))
	if want := "true :1 /s text"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestFlagsMayFollowOperands(t *testing.T) {
	for line, want := range map[string]string{
		"":                 "[] 0",
		"a --v=1 b":        "[a b] 1",
		"--v=1 a -- --v=2": "[a --v=2] 1",
		"-- a --v=2":       "[a --v=2] 0",
		"a b -v 3 - c":     "[a b - c] 3",
	} {
		o, operands := parsedCheck(t, line)
		if got := fmt.Sprint(operands, " ", o.Verbosity); got != want {
			t.Errorf("%q: %s, want %s", line, got, want)
		}
	}
}

func TestConfigIsAFlagOrAnOperand(t *testing.T) {
	for line, want := range map[string]string{
		"":                  "/etc/config/ip-masq-agent, false",
		"file":              "file, true",
		"--config=file":     "file, true",
		"--config=a b":      "\"b\" and --config both name the config: omit one",
		"--mode=nftables a": "a, true",
	} {
		o, operands := parsedCheck(t, line)
		got := fmt.Sprint(o.UseFile(operands))
		if got == "<nil>" {
			in := strings.NewReader("")
			o.ForCommand(in)
			got = fmt.Sprintf("%s, %t", o.ConfigPath, o.MustExist)
			if o.Input != in {
				t.Errorf("%q: standard input is %v", line, o.Input)
			}
		}
		if got != want {
			t.Errorf("%q: %s, want %s", line, got, want)
		}
	}
	if err := cli.AddPolicyFlags(flag.NewFlagSet("", flag.ContinueOnError)).UseFile([]string{""}); err == nil {
		t.Error("the name of a file may be empty")
	}
}

// A command on the node of an agent uses the agent's flags, except where its own say otherwise.
func TestOptionsFollowTheAgentOfTheNode(t *testing.T) {
	agents := []string{
		"--mode=iptables-nft", "--masq-chain=A", "--probe-socket=/a",
	}
	for line, want := range map[string]string{
		"":                               "iptables-nft A /agents 0",
		"--mode=iptables-nft -v 1":       "iptables-nft A /agents 1",
		"-v":                             "iptables-nft A /agents 1",
		"-v /other":                      "iptables-nft A /other 1",
		"-v 2 /other":                    "iptables-nft A /other 2",
		"-v=2":                           "iptables-nft A /agents 2",
		"--mode=nftables --masq-chain=B": "nftables B /agents 0",
		"--config=/other":                "iptables-nft A /other 0",
		"/other":                         "iptables-nft A /other 0",
		"--probe-socket=/b --only=x":     "iptables-nft A /agents 0",
	} {
		fs := flag.NewFlagSet("status", flag.ContinueOnError)
		o := cli.AddNodeFlags(fs)
		fs.String("only", "", "a flag that run does not have")
		operands, err := cli.Parse(fs, strings.Fields(line))
		nfttest.NoError(t, err)
		nfttest.NoError(t, o.UseFile(operands))
		given := len(operands) > 0 || o.Given("config")
		o.ForCommand(strings.NewReader(""))
		theirs, err := o.Follow(agents, "/agents")
		nfttest.NoError(t, err)
		got := strings.TrimSpace(fmt.Sprintln(o.Mode, o.Chain, o.ConfigPath, o.Verbosity))
		if got != want {
			t.Errorf("%q: %s, want %s", line, got, want)
		}
		if o.Input == nil || o.MustExist != given || o.Given("config") != given {
			t.Errorf("%q: %+v does not know its own command line", line, o)
		}
		got = strings.TrimSpace(fmt.Sprintln(theirs.Mode, theirs.Chain, theirs.ConfigPath))
		if got != "iptables-nft A /agents" {
			t.Errorf("%q: the agent has %s", line, got)
		}
	}
	o := cli.AddNodeFlags(flag.NewFlagSet("", flag.ContinueOnError))
	if _, err := o.Follow([]string{"--newer"}, "/a"); err == nil {
		t.Error("an unknown flag of the agent is no error")
	}
}

func TestFlagsOfOlderAgentsAreKnown(t *testing.T) {
	for name, want := range map[string]bool{
		"masq-chain": true, "to-ports": true, "v": true, "logtostderr": true, "log_file": true, "one_output": true,
		"mode": false, "config": false, "takeover": false,
	} {
		if got := cli.OfOlderAgents(name); got != want {
			t.Errorf("%s: %t", name, got)
		}
	}
}
