package answer

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"nft-masq-agent/cmd/nft-masq-agent/internal/cli"
	"nft-masq-agent/cmd/nft-masq-agent/internal/health"
	"nft-masq-agent/config"
	"nft-masq-agent/nft"
)

// A Check is the output of check. With --strict a config with warnings is still accepted;
// only the exit code differs.
type Check struct {
	cli.Head
	// Config that was checked.
	Config Config `json:"config"`
	// Meaning of an accepted config.
	Meaning *meaning `json:"meaning,omitempty"`
}

// A meaning is what a valid config means.
type meaning struct {
	// SourcePorts says how source ports are chosen.
	SourcePorts string `json:"sourcePorts"`
	// ResyncSeconds is the time between two complete comparisons of file and kernel.
	ResyncSeconds float64 `json:"resyncSeconds"`
	// EnableIPv6 is false if nothing of IPv6 is masqueraded.
	EnableIPv6 bool `json:"enableIPv6"`
	// Entries of the keys: first those that control source address translation, then the
	// conditions of each family in the order in which they are asked.
	Entries []Entry `json:"entries"`
}

// NewCheck reports a config, which is not accepted if there is an error.
func NewCheck(h cli.Head, o cli.Options, l Loaded, err error) Check {
	r := Check{Head: h, Config: NewConfig(o, l, err)}
	r.Take(config.ProblemsOf(err))
	if err == nil {
		r.Take(l.Problems)
		r.Take(hints(l.Ruleset.Policy))
		r.Meaning = newMeaning(l.Config, l.Ruleset.Policy)
	}
	return r
}

// hints finds what is probably not meant. Warnings of the parser are not repeated.
func hints(p nft.Policy) (found config.Problems) {
	blocks := 0
	for _, f := range p.Families {
		blocks += p.PortBlocks(f.IPv6).Count()
		found = append(found, health.Exempt(f)...)
	}
	const plenty = 1000 // more than eight new connections a second to one destination
	if blocks > 0 && p.PortsPerPod < plenty {
		found = append(found, cli.Problem(config.Note, "time-wait",
			"%s: to one destination and port, a pod can open %d UDP sockets in 30 s, and up to Linux 6.4 %[2]d TCP connections "+
				"in 120 s, because closed ones keep their ports for so long", config.KeyPortsPerPod, p.PortsPerPod))
	}
	return found
}

func newMeaning(c config.Config, p nft.Policy) *meaning {
	m := &meaning{
		SourcePorts: sourcePorts(p), ResyncSeconds: c.ResyncInterval.Seconds(), EnableIPv6: c.EnableIPv6,
		Entries: entries(p),
	}
	values := map[string]string{} // that the policy has without their places
	if p.DropInvalid {
		values[config.KeyDropInvalid] = "true"
	}
	if p.PortsPerPod > 0 {
		values[config.KeyPortsPerPod] = strconv.Itoa(p.PortsPerPod)
	}
	for _, row := range config.Translations() {
		if value, set := values[row.Key]; set {
			title := row.Key + ": " + row.Means
			m.Entries = append(m.Entries, Entry{Key: row.Key, Value: value, Place: c.Given(row.Key), title: title})
		}
	}
	return m
}

func sourcePorts(p nft.Policy) string {
	text := choose(p.RandomFully, "fully random", "kept if free")
	if len(p.Ports) > 0 {
		text += "; tcp, udp, sctp: " + portRanges(p.Ports)
	}
	b := p.PortBlocks(false)
	if b.Count() == 0 {
		b = p.PortBlocks(true)
	}
	if b.Count() > 0 {
		text += fmt.Sprintf("; pods: %d blocks of %d from %d on, this node: %s", b.Count(), b.Size, b.Block(0).Min,
			portRanges(b.NodePorts))
	}
	return text
}

// Print writes the report. The config must be accepted.
func (r *Check) Print(t cli.Text) {
	m := r.Meaning
	t.Problems(r.Errors)
	t.Line("%s\n", r.verdict())
	t.Line("config        %s", r.Config.Hash)
	t.Line("mode          %s: %s", r.Config.Mode, choose(r.Config.Chain == "", "table inet "+nft.TableName,
		"chain "+r.Config.Chain))
	t.Line("IPv6          %s", choose(m.EnableIPv6, "on", "off: IPv6 is not masqueraded"))
	t.Line("source ports  %s", m.SourcePorts)
	t.Line("resync        every %s", time.Duration(m.ResyncSeconds*float64(time.Second)))
	width := 16
	for _, e := range m.Entries {
		width = max(width, min(len(e.Value), 60))
	}
	title := ""
	for _, e := range m.Entries {
		if e.title != title {
			title = e.title
			t.Line("\n%s", title)
		}
		t.Line("  %-*s  %s", width, e.Value, placeText(e.Place, e.Value))
	}
	t.List("Warnings:", r.Warnings)
	t.List("Notes:", r.Notes)
}

// verdict lists the valid files, or reports that the defaults apply.
func (r *Check) verdict() string {
	switch files := r.Config.Files; len(files) {
	case 0:
		return "no config at " + r.Config.Path + ": the built-in defaults apply"
	case 1:
		return files[0] + " is valid"
	default:
		return fmt.Sprintf("the %d files in %s are valid, merged in this order:\n  %s", len(files), r.Config.Path,
			strings.Join(files, "\n  "))
	}
}
