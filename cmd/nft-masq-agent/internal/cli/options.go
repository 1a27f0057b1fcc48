package cli

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/native"
	"nft-masq-agent/nft/xtables"
)

// Parse parses flags before and after the operands.
func Parse(fs *flag.FlagSet, args []string) (operands []string, err error) {
	for {
		if err := fs.Parse(args); err != nil {
			return nil, err
		}
		remaining := fs.Args()
		if len(remaining) == 0 {
			return operands, nil
		}
		if position := len(args) - len(remaining); position > 0 && args[position-1] == "--" {
			return append(operands, remaining...), nil
		} else if position > 0 && takes(fs, args[position-1], remaining[0]) {
			args = remaining[1:]
			continue
		}
		operands = append(operands, remaining[0])
		args = remaining[1:]
	}
}

// Follow returns the options of an agent that runs with these flags and the config at an
// absolute path, and uses them for all flags that the command line does not have.
func (o *Options) Follow(args []string, path string) (agentOptions Options, err error) {
	theirFlags := flag.NewFlagSet("run", flag.ContinueOnError)
	theirFlags.SetOutput(io.Discard)
	t := AddRunFlags(theirFlags)
	if err := errors.Join(theirFlags.Parse(args), theirFlags.Set("config", path)); err != nil {
		return Options{}, err
	}
	agentOptions = *t
	// Flags that run does not have are not set.
	o.given.Visit(func(f *flag.Flag) { _ = theirFlags.Set(f.Name, f.Value.String()) })
	t.MustExist = o.MustExist
	t.Input = o.Input
	t.given = o.given
	*o = *t
	return agentOptions, nil
}

// Formats of the log.
const (
	LogJSON = "json" // one object per line
	LogText = "text" // for people
)

// Options are the values of the command line, or their defaults.
type Options struct {
	// For every command: the policy and its layout.
	ConfigPath  string
	Mode        nft.Mode
	RandomFully *bool // nil: the layout's default
	Ports       []nft.PortRange
	Marks       []nft.Mark
	config.Defaults

	// For run.
	TakeOver    bool
	HTTPAddress string // "": off
	ProbeSocket string // "": off
	LogFormat   string

	given *flag.FlagSet // the command line

	// The flag of klog and glog that has an effect.
	Verbosity int

	// For commands that read a config once; see ForCommand.
	MustExist bool
	Manifest  bool      // the config is in a ConfigMap manifest
	Input     io.Reader // standard input; nil for the agent itself
}

// DefaultConfig is the path of the older agents' config.
const DefaultConfig = "/etc/config/ip-masq-agent"

// DefaultProbeSocket is the socket that the command ready uses. In the manifests
// it is in a separate volume of the pod.
const DefaultProbeSocket = "/run/nft-masq-agent/probe.sock"

// NFT returns the options of the compiler.
func (o Options) NFT() nft.Options {
	n := nft.Options{Layout: native.Layout{}, RandomFully: true, Ports: o.Ports, Marks: o.Marks}
	if o.Mode == nft.ModeIPTables {
		n.Layout = xtables.Layout{ChainName: o.Chain}
		n.RandomFully = false
	}
	if o.RandomFully != nil {
		n.RandomFully = *o.RandomFully
	}
	return n
}

// OfOlderAgents reports whether one of the older agents also has a flag.
func OfOlderAgents(name string) bool {
	return IsKlogFlag(name) || slices.Contains([]string{
		"masq-chain", "nomasq-all-reserved-ranges", "enable-ipv6", "random-fully", "to-ports", "resync-interval",
	}, name)
}

// AddPolicyFlags declares the flags of all commands that use a policy.
func AddPolicyFlags(fs *flag.FlagSet) *Options {
	o := &Options{given: fs}
	o.addKlogFlags(fs)
	AddFlag(fs, &o.ConfigPath, "config", DefaultConfig, "`PATH` of the config: a file, or a directory of files",
		parseConfigPath)
	AddFlag(fs, &o.Mode, "mode", string(nft.ModeNFTables),
		"`MODE`: nftables uses its own table; iptables-nft uses a chain that iptables can show",
		OneOf(nft.ModeNFTables, nft.ModeIPTables))
	AddFlag(fs, &o.Chain, "masq-chain", "IP-MASQ-AGENT", "`NAME` of the chain in mode iptables-nft", parseChain)
	fs.BoolVar(&o.AllReservedRanges, "nomasq-all-reserved-ranges", false,
		"exempt all reserved IPv4 ranges, not only those of RFC 1918, unless the config sets nonMasqueradeCIDRs")
	fs.BoolVar(&o.EnableIPv6, "enable-ipv6", false, "masquerade IPv6 too, unless the config sets enableIPv6")
	AddFlag(fs, &o.RandomFully, "random-fully", "",
		"choose source ports at random (default true in mode nftables, false in mode iptables-nft)", parseBool)
	AddFlag(fs, &o.Ports, "to-ports", "",
		"masquerade tcp, udp and sctp to these port `RANGES` only, such as 1024-29999,32768-65535", parsePorts)
	AddFlag(fs, &o.Marks, "masquerade-marks", "0x4000/0x4000,0x2000/0x2000",
		"`MARKS` of packets that other programs masquerade so that replies return, which enforceNonMasquerade leaves "+
			"to them", nft.ParseMarks)
	AddFlag(fs, &o.ResyncInterval, "resync-interval", "60",
		"`SECONDS` between two checks of file and kernel without an event, unless the config sets resyncInterval",
		parseSeconds)
	return o
}

// AddNodeFlags declares the flags of all commands that answer for this node.
func AddNodeFlags(fs *flag.FlagSet) *Options {
	o := AddPolicyFlags(fs)
	level := fs.Lookup("v")
	level.Value = &optionalFlag[int]{parsedFlag[int]{target: &o.Verbosity, text: "0", parse: strconv.Atoi}, "1"}
	level.Usage = "`[LEVEL]` of detail: with 1, or without a level, also the flags of the running agent, and counters " +
		"that are zero"
	AddFlag(fs, &o.ProbeSocket, "probe-socket", "",
		"`PATH` of the unix socket on which the agent answers (default "+DefaultProbeSocket+")", ParseSocketPath)
	return o
}

// AddManifest declares --manifest.
func (o *Options) AddManifest(fs *flag.FlagSet) {
	fs.BoolVar(&o.Manifest, "manifest", false, "the file is a ConfigMap manifest: read its entry config, ip-masq-agent "+
		"or only entry")
}

// AddRunFlags declares the flags of run.
func AddRunFlags(fs *flag.FlagSet) *Options {
	o := AddPolicyFlags(fs)
	fs.BoolVar(&o.TakeOver, "takeover", false,
		"remove the rules of iptables-based agents in the transaction that activates ours")
	AddFlag(fs, &o.HTTPAddress, "http-address", "",
		"`HOST:PORT` of /healthz, /startupz, /readyz and /metrics; off if empty", ParseHTTPAddress)
	AddFlag(fs, &o.ProbeSocket, "probe-socket", "",
		"`PATH` of a unix socket that answers the command ready, and other commands in the same pod; off if empty",
		ParseSocketPath)
	AddFlag(fs, &o.LogFormat, "log-format", LogJSON, "json or text `FORMAT` of the log", OneOf(LogJSON, LogText))
	return o
}

// A parsedFlag is a flag with a parse function.
type parsedFlag[T any] struct {
	target  *T
	text    string
	parse   func(string) (T, error)
	warning error
}

// A warning is a problem of a value that is accepted anyway.
type warning struct{ error }

// Warnings returns the problems of values that were accepted anyway because the
// older agents accept them.
func Warnings(fs *flag.FlagSet) (warnings []string) {
	fs.Visit(func(f *flag.Flag) {
		if w, ok := f.Value.(interface{ warn() error }); ok && w.warn() != nil {
			warnings = append(warnings, fmt.Sprintf("--%s %q: %v", f.Name, f.Value, w.warn()))
		}
	})
	return warnings
}

// AddFlag declares a flag with a parse function; otherwise is the text of its
// default, "" for the zero value.
func AddFlag[T any](fs *flag.FlagSet, target *T, name, otherwise, usage string, parse func(string) (T, error)) {
	if otherwise != "" {
		*target, _ = parse(otherwise)
	}
	fs.Var(&parsedFlag[T]{target: target, text: otherwise, parse: parse}, name, usage)
}

// An optionalFlag is a flag that may be given without a value.
type optionalFlag[T any] struct {
	parsedFlag[T]
	implied string // the value that it then has
}

// AddOptional declares a flag that may be given without a value, and then has a text as its value. It does not take
// what follows as its value if that cannot be parsed.
func AddOptional[T any](fs *flag.FlagSet, target *T, name, implied, usage string, parse func(string) (T, error)) {
	fs.Var(&optionalFlag[T]{parsedFlag[T]{target: target, parse: parse}, implied}, name, usage)
}

// IsBoolFlag makes --name mean --name=true.
func (f *optionalFlag[T]) IsBoolFlag() bool { return true }

func (f *optionalFlag[T]) Set(s string) error {
	if s == "true" {
		s = f.implied
	}
	return f.parsedFlag.Set(s)
}

func (f *optionalFlag[T]) optional() {}

// takes reports whether the flag before an argument is optional, and has the argument as its value now.
func takes(fs *flag.FlagSet, name, argument string) bool {
	f := fs.Lookup(strings.TrimLeft(name, "-"))
	if f == nil || !strings.HasPrefix(name, "-") {
		return false
	}
	_, optional := f.Value.(interface{ optional() })
	return optional && f.Value.Set(argument) == nil
}

func (f *parsedFlag[T]) warn() error { return f.warning }

func (f *parsedFlag[T]) String() string { return f.text }

// IsBoolFlag makes --name mean --name=true.
func (f *parsedFlag[T]) IsBoolFlag() bool {
	_, boolean := any(f.target).(**bool)
	return boolean
}

func (f *parsedFlag[T]) Set(s string) error {
	v, err := f.parse(s)
	w := warning{}
	if err != nil && !errors.As(err, &w) {
		return err
	}
	*f.target = v
	f.text = s
	f.warning = w.error
	return nil
}

// OneOf returns a parse function that accepts only the given words.
func OneOf[T ~string](values ...T) func(string) (T, error) {
	return func(s string) (T, error) {
		if slices.Contains(values, T(s)) {
			return T(s), nil
		}
		words := make([]string, len(values))
		for i, v := range values {
			words[i] = string(v)
		}
		return "", fmt.Errorf("must be %s", strings.Join(words, " or "))
	}
}

func parseConfigPath(s string) (string, error) {
	if s == "" {
		return "", errors.New("is empty")
	}
	return s, nil
}

// ParseSocketPath parses the path of a unix socket.
func ParseSocketPath(s string) (string, error) {
	const limit = 107 // bytes of sun_path, without the terminating zero
	if len(s) > limit {
		return "", fmt.Errorf("is %d bytes long, the path of a unix socket has at most %d", len(s), limit)
	}
	return s, nil
}

func parseBool(s string) (*bool, error) {
	v, err := strconv.ParseBool(s)
	if err != nil {
		return nil, errors.New("is neither true nor false")
	}
	return &v, nil
}

func parseChain(s string) (string, error) { return s, xtables.CheckChain(s) }

// parseSeconds parses --resync-interval. Azure's agent accepts any number.
func parseSeconds(s string) (time.Duration, error) {
	n, err := strconv.ParseInt(s, 0, 64)
	switch {
	case err != nil:
		return 0, errors.New("is not a whole number of seconds")
	case n < 1:
		return time.Second, warning{errors.New("is less than 1 s; 1 s is used")}
	case n > 24*60*60:
		return 24 * time.Hour, warning{errors.New("is more than 24 h; 24 h are used")}
	}
	return time.Duration(n) * time.Second, nil
}

// parsePorts warns if the ports that are used are not those that were written: the older agents read many texts.
func parsePorts(s string) ([]nft.PortRange, error) {
	ranges, err := config.ParsePorts(s)
	if err != nil {
		return nil, err
	}
	words := make([]string, len(ranges))
	for i, r := range ranges {
		words[i] = r.String()
	}
	if taken := strings.Join(words, ","); taken != s {
		return ranges, warning{fmt.Errorf("%s is used", taken)}
	}
	return ranges, nil
}

// ParseHTTPAddress checks a HOST:PORT; "" is off.
func ParseHTTPAddress(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "", errors.New("is not a HOST:PORT, such as 127.0.0.1:9717 or :9717")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("has port %q, which is not a number from 0 to 65535", port)
	}
	if strings.ContainsAny(host, " /") {
		return "", fmt.Errorf("has %q, which is not a host", host)
	}
	return s, nil
}
