package running

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"nft-masq-agent/cmd/nft-masq-agent/internal/options"
)

// An Agent is a process of our agent in this network namespace. As JSON it is
// part of the output of status.
type Agent struct {
	PID  int      `json:"pid"`
	Args []string `json:"args"` // after the names of the program and the command
	// Policy is what it reports on its probe socket; nil if it was not asked or
	// not reached.
	Policy  *Policy         `json:"policy,omitempty"`
	Options options.Options `json:"-"` // parsed from Args
	Err     error           `json:"-"` // why this version cannot parse them
}

// Agents finds agents in a procfs, sorted by PID: processes of the given program
// in this network namespace, running as root or as the caller, except this
// process. Any user can choose the name of a process, so one whose namespace or
// user cannot be read does not count. Neither does one whose child is this
// process or another agent, because the child does the work.
func Agents(proc, program string) []Agent {
	entries, err := os.ReadDir(proc)
	if err != nil {
		return nil
	}
	self, _ := os.Readlink(filepath.Join(proc, "self"))
	var agents []Agent
	parents := map[int]bool{}
	if _, ok := agentArgs(proc, self, program); ok {
		parents[parent(proc, self)] = true
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || e.Name() == self {
			continue
		}
		if !trusted(filepath.Join(proc, e.Name())) || !sameNamespace(proc, e.Name(), "ns/net") {
			continue
		}
		if args, ok := agentArgs(proc, e.Name(), program); ok {
			agents = append(agents, newAgent(proc, pid, args))
			parents[parent(proc, e.Name())] = true
		}
	}
	agents = slices.DeleteFunc(agents, func(a Agent) bool { return parents[a.PID] })
	slices.SortFunc(agents, func(a, b Agent) int { return a.PID - b.PID })
	return agents
}

// parent returns the parent of a process, 0 if that cannot be read.
func parent(proc, pid string) int {
	stat, _ := os.ReadFile(filepath.Join(proc, pid, "stat")) // pid (name) state ppid …
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return 0
	}
	n, _ := strconv.Atoi(fields[1])
	return n
}

// agentArgs returns the flags of a process if it is a running agent. The command
// line of another program is not read: its memory may be in a file system that
// does not respond.
func agentArgs(proc, pid, program string) ([]string, bool) {
	if !runs(proc, pid, program) {
		return nil, false
	}
	line, err := os.ReadFile(filepath.Join(proc, pid, "cmdline"))
	if err != nil || len(line) == 0 {
		return nil, false
	}
	words := strings.Split(strings.TrimSuffix(string(line), "\x00"), "\x00")
	args := words[1:]
	if len(args) > 0 && args[0] == "run" {
		return args[1:], true
	}
	return args, len(args) == 0 || strings.HasPrefix(args[0], "-")
}

// runs reports whether a process runs a file of this name, or this process's
// own. It does not access the file, whose file system may not respond: it reads
// what the kernel knows.
func runs(proc, pid, program string) bool {
	path, err := os.Readlink(filepath.Join(proc, pid, "exe"))
	if err != nil {
		return false
	}
	return filepath.Base(strings.TrimSuffix(path, " (deleted)")) == program || sameFile(filepath.Join(proc, "self", "exe"), filepath.Join(proc, pid, "exe"))
}

func sameFile(a, b string) bool {
	var of [2]unix.Statx_t
	for i, path := range []string{a, b} {
		if unix.Statx(unix.AT_FDCWD, path, unix.AT_STATX_DONT_SYNC, unix.STATX_INO, &of[i]) != nil {
			return false
		}
	}
	return of[0].Ino == of[1].Ino && of[0].Dev_major == of[1].Dev_major && of[0].Dev_minor == of[1].Dev_minor
}

// trusted reports whether a process runs as root or as the caller. The directory of
// a process belongs to its effective user.
func trusted(dir string) bool {
	var st unix.Stat_t
	err := unix.Stat(dir, &st)
	return err == nil && (st.Uid == 0 || int(st.Uid) == os.Geteuid())
}

// sameNamespace reports whether a process is known to be in a namespace of this one.
func sameNamespace(proc, pid, namespace string) bool {
	own, err := os.Readlink(filepath.Join(proc, "self", namespace))
	if err != nil {
		return false
	}
	other, err := os.Readlink(filepath.Join(proc, pid, namespace))
	return err == nil && own == other
}

func newAgent(proc string, pid int, args []string) Agent {
	o, err := options.ParseRun(args)
	a := Agent{PID: pid, Args: args, Err: err}
	dir := filepath.Join(proc, strconv.Itoa(pid))
	if cwd, err := os.Readlink(filepath.Join(dir, "cwd")); err == nil && !filepath.IsAbs(o.ConfigPath) {
		o.ConfigPath = filepath.Join(cwd, o.ConfigPath)
	}
	if filepath.IsAbs(o.ConfigPath) && !sameNamespace(proc, strconv.Itoa(pid), "ns/mnt") {
		o.Root = filepath.Join(dir, "root")
	}
	a.Options = *o
	return a
}

// String returns the agent and its flags, quoted because they are another
// process's text.
func (a Agent) String() string {
	if len(a.Args) == 0 {
		return fmt.Sprintf("the running agent (pid %d, without flags)", a.PID)
	}
	words := make([]string, len(a.Args))
	for i, arg := range a.Args {
		words[i] = strings.Trim(strconv.Quote(arg), `"`)
	}
	return fmt.Sprintf("the running agent (pid %d: %s)", a.PID, strings.Join(words, " "))
}

// Follow uses the options of a running agent, if there is one and the command
// line has no policy flags. It returns a text about this, or "".
func Follow(o *options.Options, fs *flag.FlagSet, agents []Agent) string {
	return follow(o, fs, agents, options.PolicyFlags())
}

// FollowFlags is like Follow, but --config on the command line is allowed, and
// used.
func FollowFlags(o *options.Options, fs *flag.FlagSet, agents []Agent) string {
	was := *o
	others := slices.DeleteFunc(options.PolicyFlags(), func(name string) bool { return name == "config" })
	note := follow(o, fs, agents, others)
	o.Input = was.Input
	if Given(fs, "config") {
		o.ConfigPath, o.Root, o.MustExist = was.ConfigPath, "", was.MustExist
	}
	return note
}

// Given reports whether one of the flags is on the command line.
func Given(fs *flag.FlagSet, names ...string) (given bool) {
	fs.Visit(func(f *flag.Flag) { given = given || slices.Contains(names, f.Name) })
	return given
}

func follow(o *options.Options, fs *flag.FlagSet, agents []Agent, policyFlags []string) string {
	if Given(fs, policyFlags...) || len(agents) == 0 {
		return ""
	}
	first := agents[0]
	if first.Err != nil {
		return fmt.Sprintf("not with the flags of %s: %v", first, first.Err)
	}
	*o = first.Options
	if len(agents) > 1 {
		return fmt.Sprintf("with the flags of %s, one of %d that run here", first, len(agents))
	}
	return fmt.Sprintf("with the flags of %s", first)
}
