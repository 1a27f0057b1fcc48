package main

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest"
)

var seed = flag.Uint64("seed", 1, "of what is random")

// A meddler changes the path of a config.
type meddler struct {
	*rand.Rand
	node  *testNode
	dir   string // of the config
	mode  nft.Mode
	count int // of contents written, all different
}

// content returns a new content, which is accepted four times out of five.
func (m *meddler) content() string {
	m.count++
	if m.IntN(5) == 0 {
		return []string{
			fmt.Sprintf("nonMasqueradeCIDRs: [bad%d]\n", m.count),
			fmt.Sprintf("a%d: [\n", m.count),
			fmt.Sprintf("cidrLimit: %d\nresyncInterval: 60\n", m.count),
		}[m.IntN(3)]
	}
	return m.good()
}

func (m *meddler) good() string {
	m.count++
	key := "enableIPv6"
	if m.mode == nft.ModeIPTables { // which has not that key
		key = "masqLinkLocalIPv6"
	}
	return exempting(fmt.Sprintf("10.%d.%d.0/24", m.count>>8&0xff, m.count&0xff), fmt.Sprintf("fd00:%x::/32", m.count)) +
		fmt.Sprintf("%s: %t\n", key, m.IntN(2) == 0)
}

// put writes a new file, or an existing one in place.
func put(path, text string, parts int) error {
	// Anything but a file does not make the writer wait.
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC|unix.O_NONBLOCK, 0o644)
	if err != nil {
		return err
	}
	for i := range parts {
		_, _ = f.WriteString(text[len(text)*i/parts : len(text)*(i+1)/parts])
	}
	return f.Close()
}

// into replaces the path with what was created next to it.
func (m *meddler) into(made string) error {
	if unix.Renameat2(unix.AT_FDCWD, made, unix.AT_FDCWD, m.node.path, unix.RENAME_EXCHANGE) != nil {
		return os.Rename(made, m.node.path)
	}
	return os.RemoveAll(made)
}

// nextTo returns an unused path for what replaces the config.
func (m *meddler) nextTo() string {
	_ = os.MkdirAll(m.dir, 0o755)
	path := m.node.path + ".new"
	_ = os.RemoveAll(path)
	return path
}

func (m *meddler) swapFile(text string) error {
	made := m.nextTo()
	if err := put(made, text, 1); err != nil {
		return err
	}
	return m.into(made)
}

func (m *meddler) swapDirectory() error {
	made := m.nextTo()
	_ = os.Mkdir(made, 0o755)
	for _, name := range []string{"a.yaml", "b.yaml", ".hidden"}[:1+m.IntN(3)] {
		if err := put(filepath.Join(made, name), m.content(), 1); err != nil {
			return err
		}
	}
	return m.into(made)
}

// publish updates the volume like the kubelet.
func (m *meddler) publish() error {
	_ = os.MkdirAll(m.dir, 0o755)
	version, data, next := fmt.Sprintf("..%d", m.count), filepath.Join(m.dir, "..data"), filepath.Join(m.dir, "..data_tmp")
	if err := os.Mkdir(filepath.Join(m.dir, version), 0o755); err != nil {
		return err
	}
	_ = put(filepath.Join(m.dir, version, "ip-masq-agent"), m.content(), 1)
	_ = os.Symlink(version, next)
	old, _ := os.Readlink(data)
	if err := os.Rename(next, data); err != nil {
		return err
	}
	if to, _ := os.Readlink(m.node.path); to != "..data/ip-masq-agent" {
		made := m.nextTo()
		_ = os.Symlink("..data/ip-masq-agent", made)
		if err := m.into(made); err != nil {
			return err
		}
	}
	if old == "" {
		return nil
	}
	return os.RemoveAll(filepath.Join(m.dir, old))
}

func (m *meddler) link(to string) error {
	made := m.nextTo()
	if err := os.Symlink(to, made); err != nil {
		return err
	}
	return m.into(made)
}

func (m *meddler) exchangeParent() error {
	other := m.dir + ".other"
	_ = os.RemoveAll(other)
	if err := os.Mkdir(other, 0o755); err != nil {
		return err
	}
	_ = put(filepath.Join(other, "ip-masq-agent"), m.content(), 1)
	if unix.Renameat2(unix.AT_FDCWD, other, unix.AT_FDCWD, m.dir, unix.RENAME_EXCHANGE) != nil {
		return os.Rename(other, m.dir)
	}
	return nil
}

// operation does something to the path and returns a description. What is
// impossible in the current state fails.
func (m *meddler) operation() string {
	path := m.node.path
	kinds := []struct {
		name string
		do   func() error
	}{
		{"swap", func() error { return m.swapFile(m.content()) }},
		{"swap", func() error { return m.swapFile(m.content()) }},
		{"write", func() error { return put(path, m.content(), 1) }},
		{"write in parts", func() error { return put(path, m.content(), 2+m.IntN(4)) }},
		{"append", func() error {
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|unix.O_NONBLOCK, 0)
			if err != nil {
				return err
			}
			_, _ = fmt.Fprintf(f, "# %d\n", m.count)
			return f.Close()
		}},
		{"truncate", func() error { return os.Truncate(path, 0) }},
		{"remove", func() error { return os.RemoveAll(path) }},
		{"remove and write", func() error { _ = os.RemoveAll(path); return put(path, m.content(), 1) }},
		{"remove the parent", func() error { return os.RemoveAll(m.dir) }},
		{"move the parent away", func() error { _ = os.RemoveAll(m.dir + ".away"); return os.Rename(m.dir, m.dir+".away") }},
		{"move the parent back", func() error { return os.Rename(m.dir+".away", m.dir) }},
		{"create the parent", func() error { return os.Mkdir(m.dir, 0o755) }},
		{"exchange the parent", m.exchangeParent},
		{"swap a directory", m.swapDirectory},
		{"write in the directory", func() error { return put(filepath.Join(path, "b.yaml"), m.content(), 1) }},
		{"remove from the directory", func() error { return os.Remove(filepath.Join(path, "a.yaml")) }},
		{"publish", m.publish},
		{"publish", m.publish},
		{"write a file and link to it", func() error {
			_ = put(m.dir+".file", m.content(), 1)
			return m.link(m.dir + ".file")
		}},
		{"write the link target", func() error { return put(m.dir+".file", m.content(), 1) }},
		{"link to nowhere", func() error { return m.link("nowhere") }},
		{"link to itself", func() error { return m.link("ip-masq-agent") }},
		{"FIFO", func() error {
			made := m.nextTo()
			_ = unix.Mkfifo(made, 0o644)
			return m.into(made)
		}},
		{"device", func() error { return m.link("/dev/zero") }},
		{"flush ruleset", func() error { _, err := m.node.Output("flush ruleset", "nft", "-f", "-"); return err }},
	}
	kind := kinds[m.IntN(len(kinds))]
	if err := kind.do(); err != nil {
		return kind.name + ": rejected"
	}
	return kind.name
}

// TestRulesFollowTheLastValidContentAfterRandomOperations does random operations
// on the path of the config. Sometimes the agent gets SIGHUP, sometimes it is
// stopped or killed and restarted.
func TestRulesFollowTheLastValidContentAfterRandomOperations(t *testing.T) {
	t.Parallel()
	nfttest.SkipIfShort(t)
	for i, mode := range modes {
		// They wait for configs that vanish. How the path is followed does not depend on the mode.
		for part := range uint64(nfttest.FullRounds(len(modes)-i, 3)) {
			t.Run(fmt.Sprint(mode, " ", part), func(t *testing.T) {
				t.Parallel()
				n := newNode(t)
				r := rand.New(rand.NewPCG(*seed, part))
				m := &meddler{Rand: r, node: n, dir: filepath.Dir(n.path), mode: mode}
				m.meddle(t, nfttest.FullRounds(33, 3_333))
			})
		}
	}
}

// meddle does so many operations, and waits for the rules after some of them.
func (m *meddler) meddle(t *testing.T, operations int) {
	t.Helper()
	// No timer may help.
	flags := []string{
		"--mode=" + string(m.mode), "--enable-ipv6", "--http-address", httpAddress, "--resync-interval=3600",
	}
	d := m.node.start(flags...)
	want := wants(t, "", flags...)
	d.began(want)
	var log []string
	for done := 0; done < operations; {
		burst := 1 + m.IntN(3)
		for range burst {
			log = append(log, m.operation())
		}
		done += burst
		last, valid := log[len(log)-1], m.node.contentIsValid()
		if !valid && (burst > 1 || strings.Contains(last, "write")) {
			// It is unknown which of several was the last valid one that settled, or whether an
			// empty file settled when this process had to wait between truncating and writing:
			// write another.
			_ = m.swapFile(m.good())
			log = append(log, "swap a valid one")
		}
		switch m.IntN(40) {
		case 0:
			d.signal(unix.SIGHUP)
		case 1:
			if last == "flush ruleset" && !valid {
				break // without rules, a new agent would not begin with the previous ones
			}
			d.end(m.IntN(2) == 0)
			d = m.node.start(flags...)
			d.answers()
		}
		var err error
		if want, err = d.settles(want, flags); err != nil {
			t.Fatalf("seed %d: %v; the last operations: %s", *seed, err, strings.Join(log[max(0, len(log)-30):], ", "))
		}
	}
	d.stop()
}

// end stops or kills the agent.
func (d *daemon) end(well bool) {
	d.t.Helper()
	if well {
		d.stop()
		return
	}
	d.check(d.Kill())
	<-d.Done()
}

func (n *testNode) contentIsValid() bool {
	sources, err := config.Read(n.path)
	if err != nil {
		return errors.Is(err, config.ErrMissing)
	}
	_, problems := config.Parse(config.Defaults{}, sources...)
	return problems.Err() == nil
}

// settles waits until the kernel has the rules of the config or, if it is
// invalid, the previous ones, and until the agent knows which. It returns the
// wanted ruleset.
func (d *daemon) settles(before nft.Ruleset, flags []string) (nft.Ruleset, error) {
	d.t.Helper()
	want, ready := before, "ok"
	o := optionsOf(d.t, flags...)
	sources, err := config.Read(d.path)
	if config.Count(sources) == 0 && (err == nil || errors.Is(err, config.ErrMissing)) {
		err, ready = nil, "" // an agent that never had one is ready
		if d.configured {
			ready = "the config vanished ("
		}
	} else if err == nil {
		d.configured = true
	}
	if err == nil {
		var c config.Config
		var problems config.Problems
		if c, problems = config.Parse(o.Defaults, sources...); problems.Err() == nil {
			want = nft.Compile(c, o.NFT())
		}
		err = problems.Err()
	}
	if err != nil {
		first, _, _ := strings.Cut(err.Error(), "\n")
		ready = "config rejected: " + first
	}
	var says string
	var diffs []string
	late := time.Now().Add(timeout)
	for pause := 5 * time.Millisecond; time.Now().Before(late); pause = min(2*pause, 80*time.Millisecond) {
		_, says = d.get("/readyz")
		if strings.HasPrefix(says, ready) {
			if diffs = d.differences(want); len(diffs) == 0 {
				return want, nil
			}
		}
		time.Sleep(pause)
	}
	return want, fmt.Errorf("readyz returned %q, want %q; the kernel differs from %s: %q", says, ready, want.Hash(), diffs)
}

// number returns the value of a metric.
func (n *testNode) number(metric string) float64 {
	n.t.Helper()
	v, err := strconv.ParseFloat(n.metric(metric), 64)
	n.check(err)
	return v
}

func (d *daemon) openFiles() int {
	d.t.Helper()
	n, err := d.OpenFiles()
	d.check(err)
	return n
}

// memory returns the agent's peak and current memory in bytes.
func (d *daemon) memory() (peak, now int64) {
	d.t.Helper()
	peak, now, err := d.Memory()
	d.check(err)
	return peak, now
}
