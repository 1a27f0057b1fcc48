package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"nft-masq-agent/nft/nfttest"
)

// Results of a mutation.
const (
	killed   = "killed"
	endless  = "endless"
	survived = "survived"
	invalid  = "does not compile"
)

// Limits of a mutation that runs away: as much as the tests need otherwise, and more. Other
// programs may keep the machine busy, so only processor time is limited closely.
const (
	memory = 8 << 20 // KiB of address space
	spare  = 5
)

// A sample tests mutations of a package.
type sample struct {
	pkg    string
	counts map[string]int // by result
	limit  time.Duration  // of processor time
	wait   time.Duration
}

// run tests the first n mutations that compile, and prints those that survive. Those that
// overlap are in different test programs.
func (s *sample) run(drawn []mutation, n int) {
	dir := nfttest.Must(os.MkdirTemp("", "mutate-"))
	defer os.RemoveAll(dir)
	for tested := 0; len(drawn) > 0 && (n == 0 || tested < n); {
		var batch, rest []mutation
		for _, m := range drawn {
			full := n > 0 && tested+len(batch) == n
			if full || slices.ContainsFunc(batch, m.overlaps) {
				rest = append(rest, m)
			} else {
				batch = append(batch, m)
			}
		}
		drawn = rest
		for number, m := range s.build(dir, batch) {
			result, _, _ := s.test(dir, number)
			s.counts[result]++
			tested++
			if result != killed {
				fmt.Printf("%s %s:%d | %s\n", result, m.path, m.line, m)
			}
		}
	}
}

// wrong is a mutation in a message of the compiler.
var wrong = regexp.MustCompile(`mutation(\d+)\.go:`)

// build builds a test program with mutations, without those that do not compile, and
// measures what it needs when none is turned on.
func (s *sample) build(dir string, batch []mutation) []mutation {
	for len(batch) > 0 {
		out, err := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", s.overlay(dir, batch),
			"-o", s.program(dir), "./"+s.pkg).CombinedOutput()
		if err == nil {
			break
		}
		bad := map[string]bool{}
		for _, m := range wrong.FindAllStringSubmatch(string(out), -1) {
			bad[m[1]] = true
		}
		if len(bad) == 0 {
			nfttest.Check(fmt.Errorf("%s: %w\n%s", s.pkg, err, out))
		}
		s.counts[invalid] += len(bad)
		var kept []mutation
		for number, m := range batch {
			if !bad[strconv.Itoa(number)] {
				kept = append(kept, m)
			}
		}
		batch = kept
	}
	if len(batch) == 0 || s.limit > 0 {
		return batch
	}
	began := time.Now()
	s.limit, s.wait = time.Hour, time.Hour
	result, used, out := s.test(dir, -1)
	if result != survived {
		nfttest.Check(fmt.Errorf("%s: the tests fail without a mutation: %s %s", s.pkg, result, out))
	}
	s.limit, s.wait = spare*used+10*time.Second, spare*time.Since(began)+time.Minute
	return batch
}

// program is named as by go test.
func (s *sample) program(dir string) string { return filepath.Join(dir, filepath.Base(s.pkg)+".test") }

// test runs the package's fast tests with one mutation turned on, in a network namespace
// of their own, and returns the processor time that they used, and what they print.
func (s *sample) test(dir string, number int) (result string, used time.Duration, out []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), s.wait)
	defer cancel()
	limits := fmt.Sprintf("ulimit -v %d; ulimit -t %d; exec \"$@\"", memory, int(s.limit.Seconds()))
	root := os.Geteuid() == 0
	if root {
		limits = "ip link set lo up; " + limits
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", limits, "sh", s.program(dir), "-test.short", "-test.failfast",
		"-test.timeout", s.wait.String())
	cmd.Dir = s.pkg
	cmd.Env = append(os.Environ(), "MUTATION="+strconv.Itoa(number))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if root {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	state := cmd.ProcessState
	if state == nil {
		nfttest.Check(err)
	}
	used = state.UserTime() + state.SystemTime()
	exit := &exec.ExitError{}
	switch status := state.Sys().(syscall.WaitStatus); {
	case err == nil:
		return survived, used, out
	case !errors.As(err, &exit):
		nfttest.Check(err)
	case status.Signaled(), ctx.Err() != nil, bytes.Contains(out, []byte("panic: test timed out")):
		return endless, used, out
	}
	return killed, used, out
}

// added is a file that tells which mutation is turned on.
const added = `package %s

import (
	mutationOS "os"
	mutationStrconv "strconv"
)

var mutationOn, _ = mutationStrconv.Atoi(mutationOS.Getenv("MUTATION"))

func mutationIs(number int) bool { return mutationOn == number }
`

// overlay writes the changed files, the added one, and the overlay that names them.
func (s *sample) overlay(dir string, batch []mutation) string {
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		nfttest.Check(os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	replace := map[string]string{}
	numbers := map[string][]int{}
	for number, m := range batch {
		numbers[m.path] = append(numbers[m.path], number)
	}
	for path, in := range numbers {
		source := nfttest.Must(os.ReadFile(path))
		slices.SortFunc(in, func(a, b int) int { return batch[a].from - batch[b].from })
		var text strings.Builder
		at := 0
		for _, number := range in {
			m := batch[number]
			text.Write(source[at:m.from])
			fmt.Fprintf(&text, "/*line mutation%d.go:1:1*/%s/*line %s:%d:1*/", number, m.code(number), filepath.Base(path),
				m.line)
			at = m.to
		}
		text.Write(source[at:])
		replace[nfttest.Must(filepath.Abs(path))] = write(strconv.Itoa(len(replace))+".go", text.String())
	}
	first := nfttest.Must(parser.ParseFile(token.NewFileSet(), batch[0].path, nil, parser.PackageClauseOnly))
	on := nfttest.Must(filepath.Abs(filepath.Join(s.pkg, "mutation_is_on.go")))
	replace[on] = write("on.go", fmt.Sprintf(added, first.Name))
	b := nfttest.Must(json.Marshal(map[string]map[string]string{"Replace": replace}))
	return write("overlay.json", string(b))
}
