package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
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
func (s *sample) run(drawn []mutation, n int) error {
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return err
	}
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
		if batch, err = s.build(dir, batch); err != nil {
			return err
		}
		for number, m := range batch {
			result, _, err := s.test(dir, number)
			if err != nil {
				return fmt.Errorf("%s: %w", m, err)
			}
			s.counts[result]++
			tested++
			if result != killed {
				fmt.Printf("%s %s:%d | %s\n", result, m.path, m.line, m)
			}
		}
	}
	return nil
}

// wrong is a mutation in a message of the compiler.
var wrong = regexp.MustCompile(`mutation(\d+)\.go:`)

// build builds a test program with mutations, without those that do not compile, and
// measures what it needs when none is turned on.
func (s *sample) build(dir string, batch []mutation) ([]mutation, error) {
	for len(batch) > 0 {
		overlay, err := s.overlay(dir, batch)
		if err != nil {
			return nil, err
		}
		out, err := exec.Command("go", "test", "-c", "-vet=off", "-ldflags=-s -w", "-overlay", overlay,
			"-o", program(dir), "./"+s.pkg).CombinedOutput()
		if err == nil {
			break
		}
		bad := map[int]bool{}
		for _, m := range wrong.FindAllSubmatch(out, -1) {
			number, _ := strconv.Atoi(string(m[1]))
			bad[number] = true
		}
		if len(bad) == 0 {
			return nil, fmt.Errorf("%s: %w\n%s", s.pkg, err, out)
		}
		var kept []mutation
		for number, m := range batch {
			if bad[number] {
				s.counts[invalid]++
			} else {
				kept = append(kept, m)
			}
		}
		batch = kept
	}
	if len(batch) == 0 || s.limit > 0 {
		return batch, nil
	}
	began := time.Now()
	s.limit, s.wait = time.Hour, time.Hour
	result, used, err := s.test(dir, -1)
	if err != nil || result != survived {
		return nil, fmt.Errorf("%s: the tests fail without a mutation: %s %w", s.pkg, result, err)
	}
	s.limit, s.wait = spare*used+10*time.Second, spare*time.Since(began)+time.Minute
	return batch, nil
}

func program(dir string) string { return filepath.Join(dir, "package.test") }

// test runs the package's fast tests with one mutation turned on, in a network namespace
// without links, and returns the processor time that they used.
func (s *sample) test(dir string, number int) (result string, used time.Duration, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), s.wait)
	defer cancel()
	limits := fmt.Sprintf("ulimit -v %d; ulimit -t %d; exec \"$@\"", memory, int(s.limit.Seconds()))
	cmd := exec.CommandContext(ctx, "sh", "-c", limits, "sh", program(dir), "-test.short", "-test.failfast",
		"-test.timeout", s.wait.String())
	cmd.Dir = s.pkg
	cmd.Env = append(os.Environ(), "MUTATION="+strconv.Itoa(number))
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Minute
	out, err := cmd.CombinedOutput()
	state := cmd.ProcessState
	if state == nil {
		return "", 0, err
	}
	used = state.UserTime() + state.SystemTime()
	exit := &exec.ExitError{}
	switch status := state.Sys().(syscall.WaitStatus); {
	case err == nil:
		return survived, used, nil
	case !errors.As(err, &exit):
		return "", 0, err
	case status.Signaled(), ctx.Err() != nil, strings.Contains(string(out), "panic: test timed out"):
		return endless, used, nil
	}
	if number < 0 {
		return killed, used, fmt.Errorf("%s", out)
	}
	return killed, used, nil
}

// overlay writes the changed files, a function that tells which mutation is turned on, and
// the overlay that names them.
func (s *sample) overlay(dir string, batch []mutation) (string, error) {
	replace := map[string]string{}
	numbers := map[string][]int{}
	for number, m := range batch {
		numbers[m.path] = append(numbers[m.path], number)
	}
	for path, in := range numbers {
		source, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
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
		if replace[path], err = write(dir, strconv.Itoa(len(replace))+".go", text.String()); err != nil {
			return "", err
		}
	}
	name, err := packageName(batch[0].path)
	if err != nil {
		return "", err
	}
	added := filepath.Join(s.pkg, "mutation_is_on.go")
	replace[added], err = write(dir, "on.go", fmt.Sprintf(`package %s

import (
	mutationOS "os"
	mutationStrconv "strconv"
)

var mutationOn, _ = mutationStrconv.Atoi(mutationOS.Getenv("MUTATION"))

func mutationIs(number int) bool { return mutationOn == number }
`, name))
	if err != nil {
		return "", err
	}
	absolute := map[string]string{}
	for path, by := range replace {
		if path, err = filepath.Abs(path); err != nil {
			return "", err
		}
		absolute[path] = by
	}
	b, err := json.Marshal(map[string]map[string]string{"Replace": absolute})
	if err != nil {
		return "", err
	}
	return write(dir, "overlay.json", string(b))
}

func write(dir, name, text string) (path string, err error) {
	path = filepath.Join(dir, name)
	return path, os.WriteFile(path, []byte(text), 0o600)
}
