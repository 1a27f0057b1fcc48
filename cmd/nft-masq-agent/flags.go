package main

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// options are what the command line says. Those of a command without a flag
// have its default.
type options struct {
	// Of every command: what the policy is, and how it is written.
	configPath        string
	mode              nft.Mode
	chain             string
	randomFully       tristate
	ports             []nft.PortRange
	allReservedRanges bool
	enableIPv6        bool
	resyncInterval    time.Duration

	// Of run.
	takeover    bool
	httpAddress string // "" for off
	logFormat   string

	klog *klogFlags

	// root stands before the path of the config where the flags are those of
	// an agent that sees other files. It is not part of what people read.
	root string
}

const defaultConfig = "/etc/config/ip-masq-agent"

// nftOptions gives what the compiler needs.
func (o options) nftOptions() nft.Options {
	return nft.Options{
		Mode:        o.mode,
		Chain:       o.chain,
		RandomFully: o.randomFully.or(o.mode == nft.ModeNFTables),
		Ports:       o.ports,
	}
}

// defaults gives what holds where the file says nothing.
func (o options) defaults() config.Defaults {
	return config.Defaults{
		AllReservedRanges: o.allReservedRanges,
		EnableIPv6:        o.enableIPv6,
		ResyncInterval:    o.resyncInterval,
	}
}

// policyFlags lists the flags that say what the policy is.
func policyFlags() []string {
	return []string{
		"config", "mode", "masq-chain", "nomasq-all-reserved-ranges", "enable-ipv6", "random-fully", "to-ports",
		"resync-interval",
	}
}

// addPolicyFlags declares the flags of every command that deals with a policy.
func addPolicyFlags(fs *flag.FlagSet) *options {
	o := &options{klog: addKlogFlags(fs)}
	addFlag(fs, &o.configPath, "config", defaultConfig, "`PATH` of the config: a file, or a directory of files", parseConfigPath)
	addFlag(fs, &o.mode, "mode", string(nft.ModeNFTables),
		"`MODE`: nftables writes a table of its own; iptables-nft writes the chain that iptables shows",
		oneOf(nft.ModeNFTables, nft.ModeIPTables))
	addFlag(fs, &o.chain, "masq-chain", "IP-MASQ-AGENT", "`NAME` of the chain in mode iptables-nft", parseChain)
	fs.BoolVar(&o.allReservedRanges, "nomasq-all-reserved-ranges", false,
		"exempt all reserved IPv4 ranges where the file has no nonMasqueradeCIDRs, not only those of RFC 1918")
	fs.BoolVar(&o.enableIPv6, "enable-ipv6", false, "IPv6 too, where the file says nothing of enableIPv6")
	fs.Var(&o.randomFully, "random-fully",
		"choose source ports at random (default true in mode nftables, false in mode iptables-nft)")
	addFlag(fs, &o.ports, "to-ports", "",
		"masquerade tcp, udp and sctp to these port `RANGES` only, such as 1024-29999,32768-65535", nft.ParsePorts)
	addFlag(fs, &o.resyncInterval, "resync-interval", "60",
		"`SECONDS` between two looks at file and kernel, where the file says nothing of resyncInterval", parseSeconds)
	return o
}

// addRunFlags declares the flags of run.
func addRunFlags(fs *flag.FlagSet) *options {
	o := addPolicyFlags(fs)
	fs.BoolVar(&o.takeover, "takeover", false, "remove the rules of iptables-based agents in the transaction that makes ours effective")
	addFlag(fs, &o.httpAddress, "http-address", "", "`HOST:PORT` of /healthz, /readyz and /metrics; off if empty", parseHTTPAddress)
	addFlag(fs, &o.logFormat, "log-format", logJSON, "json or text `FORMAT` of the log", oneOf(logJSON, logText))
	return o
}

// A parsedFlag is a flag whose text a function turns into its value.
type parsedFlag[T any] struct {
	to    *T
	text  string
	parse func(string) (T, error)
}

func addFlag[T any](fs *flag.FlagSet, to *T, name, otherwise, usage string, parse func(string) (T, error)) {
	if otherwise != "" {
		*to, _ = parse(otherwise)
	}
	fs.Var(&parsedFlag[T]{to, otherwise, parse}, name, usage)
}

func (f *parsedFlag[T]) String() string { return f.text }

func (f *parsedFlag[T]) Set(s string) error {
	v, err := f.parse(s)
	if err != nil {
		return err
	}
	*f.to, f.text = v, s
	return nil
}

// A tristate is a switch that knows whether it was given.
type tristate struct{ given, value bool }

func (t *tristate) String() string {
	if !t.given {
		return ""
	}
	return strconv.FormatBool(t.value)
}

func (t *tristate) Set(s string) error {
	v, err := strconv.ParseBool(s)
	if err != nil {
		return errors.New("is neither true nor false")
	}
	*t = tristate{true, v}
	return nil
}

// IsBoolFlag lets the flag stand without a value.
func (t *tristate) IsBoolFlag() bool { return true }

func (t tristate) or(otherwise bool) bool {
	if t.given {
		return t.value
	}
	return otherwise
}

func oneOf[T ~string](values ...T) func(string) (T, error) {
	return func(s string) (T, error) {
		if slices.Contains(values, T(s)) {
			return T(s), nil
		}
		words := make([]string, len(values))
		for i, v := range values {
			words[i] = string(v)
		}
		return "", fmt.Errorf("is none of %s", strings.Join(words, ", "))
	}
}

func parseConfigPath(s string) (string, error) {
	if s == "" {
		return "", errors.New("is empty")
	}
	return s, nil
}

func parseChain(s string) (string, error) { return s, nft.CheckChain(s) }

func parseSeconds(s string) (time.Duration, error) {
	const most = math.MaxInt64 / int64(time.Second)
	n, err := strconv.ParseInt(s, 10, 64)
	if d, notNumber := time.ParseDuration(s); err != nil && notNumber == nil && d >= time.Second {
		return 0, fmt.Errorf("is no whole number of seconds; write %d", int64(d/time.Second))
	}
	if err != nil || n < 1 || n > most {
		return 0, fmt.Errorf("is no number of seconds from 1 to %d", most)
	}
	return time.Duration(n) * time.Second, nil
}

func parseHTTPAddress(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "", errors.New("is no HOST:PORT, such as 127.0.0.1:9717 or :9717")
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("has port %q, which is no number from 0 to 65535", port)
	}
	if strings.ContainsAny(host, " /") {
		return "", fmt.Errorf("has %q, which is no host", host)
	}
	return s, nil
}
