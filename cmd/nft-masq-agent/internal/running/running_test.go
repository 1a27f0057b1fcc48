package running_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
	"nft-masq-agent/cmd/nft-masq-agent/internal/running"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/nfttest/cases"
	"nft-masq-agent/nft/xtables"
)

const program = "nft-masq-agent"

// A process is a process in a test's procfs.
type process struct {
	pid     string
	cmdline string // words
	exe     string // a file; the same one for the same program
	net     string // inode of the network namespace, "" for one that cannot be read
	mnt     string
	cwd     string
	uid     int
}

// adopt makes a process in a procfs the child of another.
func adopt(t *testing.T, proc, pid, parent string) {
	t.Helper()
	stat := fmt.Sprintf("%s (a) b) S %s %[1]s", pid, parent)
	if err := os.WriteFile(filepath.Join(proc, pid, "stat"), []byte(stat), 0o644); err != nil {
		t.Fatal(err)
	}
}

// layOutProc creates a procfs in which process 100 is this one.
func layOutProc(t *testing.T, processes ...process) string {
	t.Helper()
	proc, programs := t.TempDir(), t.TempDir()
	link := func(to, path string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(to, path); err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, content string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	link("100", filepath.Join(proc, "self"))
	write(filepath.Join(proc, "sys", "kernel"), "") // not a process
	for _, p := range processes {
		dir := filepath.Join(proc, p.pid)
		line := ""
		if p.cmdline != "" {
			line = strings.Join(strings.Fields(p.cmdline), "\x00") + "\x00"
		}
		write(filepath.Join(dir, "cmdline"), line)
		if p.exe != "" {
			write(filepath.Join(programs, p.exe), "")
			link(filepath.Join(programs, p.exe), filepath.Join(dir, "exe"))
		}
		if p.net != "" {
			link("net:["+p.net+"]", filepath.Join(dir, "ns/net"))
		}
		if p.mnt != "" {
			link("mnt:["+p.mnt+"]", filepath.Join(dir, "ns/mnt"))
		}
		if p.cwd != "" {
			link(p.cwd, filepath.Join(dir, "cwd"))
		}
		if p.uid != 0 {
			if err := os.Chown(dir, p.uid, p.uid); err != nil {
				t.Fatal(err)
			}
		}
	}
	return proc
}

func TestRunningAgentsAreFound(t *testing.T) {
	self := process{"100", "/bin/nft-masq-agent status", "agent", "1", "1", "/", 0}
	tests := map[string]struct {
		process process
		found   bool
	}{
		"run":                         {process{"7", "/bin/nft-masq-agent run --v=2", "agent", "1", "1", "/", 0}, true},
		"without a command":           {process{"7", "nft-masq-agent", "agent", "1", "1", "/", 0}, true},
		"flags first":                 {process{"7", "nft-masq-agent --v=2", "agent", "1", "1", "/", 0}, true},
		"the same program renamed":    {process{"7", "/masq run", "agent", "1", "1", "/", 0}, true},
		"another build of the name":   {process{"7", "/old/nft-masq-agent", "older/nft-masq-agent", "1", "1", "/", 0}, true},
		"a build that was replaced":   {process{"7", "nft-masq-agent", "nft-masq-agent (deleted)", "1", "1", "/", 0}, true},
		"another program of the name": {process{"7", "nft-masq-agent", "other", "1", "1", "/", 0}, false},
		"no namespace to be seen":     {process{"7", "/nft-masq-agent", "", "", "", "", 0}, false},
		"process of another user":     {process{"7", "/nft-masq-agent run", "agent", "1", "1", "/", 65534}, false},
		"another command":             {process{"7", "nft-masq-agent check", "agent", "1", "1", "/", 0}, false},
		"another network namespace":   {process{"7", "nft-masq-agent run", "agent", "2", "1", "/", 0}, false},
		"another program":             {process{"7", "ip-masq-agent run", "other", "1", "1", "/", 0}, false},
		"process that mentions it":    {process{"7", "sh -c nft-masq-agent", "sh", "1", "1", "/", 0}, false},
		"a kernel thread or a zombie": {process{"7", "", "", "1", "1", "/", 0}, false},
	}
	for name, tt := range tests {
		agents := running.Agents(layOutProc(t, self, tt.process), program)
		if (len(agents) == 1) != tt.found || len(agents) > 1 {
			t.Errorf("%s: %+v", name, agents)
		}
	}
	if agents := running.Agents(layOutProc(t, process{"100", "nft-masq-agent run", "agent", "1", "1", "/", 0}), program); len(agents) != 0 {
		t.Errorf("this process was found itself: %+v", agents)
	}
	if agents := running.Agents(filepath.Join(t.TempDir(), "nothing"), program); len(agents) != 0 {
		t.Errorf("without procfs: %+v", agents)
	}
}

func TestCommandLinesOfOtherProgramsAreNotRead(t *testing.T) {
	proc := layOutProc(t, process{"100", "nft-masq-agent status", "agent", "1", "1", "/", 0},
		process{"7", "other", "other", "1", "1", "/", 0}, process{"8", "nft-masq-agent", "agent", "1", "1", "/", 0})
	line := filepath.Join(proc, "7", "cmdline")
	if err := errors.Join(os.Remove(line), unix.Mkfifo(line, 0o644)); err != nil { // opening it blocks
		t.Fatal(err)
	}
	if agents := running.Agents(proc, program); len(agents) != 1 || agents[0].PID != 8 {
		t.Errorf("got %+v", agents)
	}
}

func TestAgentAndItsChildCountOnce(t *testing.T) {
	agent := func(pid string) process { return process{pid, "nft-masq-agent run", "agent", "1", "1", "/", 0} }
	pids := func(proc string) (pids []int) {
		for _, a := range running.Agents(proc, program) {
			pids = append(pids, a.PID)
		}
		return pids
	}
	proc := layOutProc(t, process{"100", "nft-masq-agent status", "agent", "1", "1", "/", 0}, agent("7"), agent("9"))
	adopt(t, proc, "9", "7")
	if diff := cmp.Diff([]int{9}, pids(proc)); diff != "" {
		t.Errorf("pids (-want +got):\n%s", diff)
	}
	adopt(t, proc, "9", "1")
	adopt(t, proc, "100", "7") // an agent that is PID 1 of a container adopts orphans
	if diff := cmp.Diff([]int{7, 9}, pids(proc)); diff != "" {
		t.Errorf("pids (-want +got):\n%s", diff)
	}
	proc = layOutProc(t, agent("100"), agent("7"))
	adopt(t, proc, "100", "7")
	if found := pids(proc); found != nil {
		t.Errorf("an agent finds its parent: %v", found)
	}
}

func TestFlagsOfRunningAgentAreParsed(t *testing.T) {
	self := process{"100", "nft-masq-agent status", "agent", "1", "1", "/", 0}
	proc := layOutProc(t, self,
		process{"30", "nft-masq-agent", "agent", "1", "1", "/", 0},
		process{"9", "nft-masq-agent --masq-chain=IP-MASQ --mode iptables-nft --takeover --config conf/a --http-address :9717", "agent", "1", "2", "/etc", 0},
		process{"40", "nft-masq-agent --from-the-future", "agent", "1", "1", "/", 0},
	)
	agents := running.Agents(proc, program)
	var pids []int
	for _, a := range agents {
		pids = append(pids, a.PID)
	}
	if diff := cmp.Diff([]int{9, 30, 40}, pids); diff != "" {
		t.Fatalf("pids (-want +got):\n%s", diff)
	}
	o := agents[0].Options
	if o.ConfigPath != "/etc/conf/a" || o.Root != filepath.Join(proc, "9/root") {
		t.Errorf("config %q below %q", o.ConfigPath, o.Root)
	}
	if diff := cmp.Diff(nft.Options{Layout: xtables.Layout{Name: "IP-MASQ"}, Marks: cases.Marks()}, o.NFT()); diff != "" {
		t.Errorf("options (-want +got):\n%s", diff)
	}
	if o := agents[1].Options; agents[1].Err != nil || o.ConfigPath != options.DefaultConfig || o.Root != "" {
		t.Errorf("without flags: %+v", agents[1])
	}
	if agents[2].Err == nil {
		t.Error("unknown flags are not an error")
	}
}
