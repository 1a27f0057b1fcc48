// Command mutate shows how much a package's own fast tests see: it changes one condition
// or statement at a time, runs `go test -short` of that package alone, and counts the
// changes that make it fail. The files themselves are never changed (go test -overlay).
//
//	go run ./nft/nfttest/mutate [flags] PACKAGE...
//
// The sample is drawn at random, by -seed. What nobody can observe is listed with its
// reason in survivors.txt and is not drawn.
package main

import (
	"context"
	_ "embed"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

//go:embed survivors.txt
var survivors string

// memory is the most address space of a test, which a mutation may let run away.
const memory = 8 << 20 // KiB

func main() {
	seed := flag.Uint64("seed", 1, "draw this sample")
	n := flag.Int("n", 60, "draw so many mutations of each package, 0: all")
	list := flag.Bool("list", false, "print what would be drawn, without tests")
	only := flag.String("only", "", "draw only mutations whose line contains this")
	flag.Parse()
	left, err := leftOut(survivors)
	if err != nil {
		fail(err)
	}
	for _, pkg := range flag.Args() {
		found, err := mutations(pkg)
		if err != nil {
			fail(err)
		}
		var drawn []mutation
		for _, m := range found {
			if left[m.String()] == "" && strings.Contains(m.String(), *only) {
				drawn = append(drawn, m)
			}
		}
		random := rand.New(rand.NewPCG(*seed, 0)) //nolint:gosec // has to be reproducible
		random.Shuffle(len(drawn), func(i, j int) { drawn[i], drawn[j] = drawn[j], drawn[i] })
		if *list {
			for _, m := range drawn {
				fmt.Printf("%s:%d | %s\n", m.path, m.line, m)
			}
			continue
		}
		if err := sample(pkg, drawn, *n, *seed, len(found)); err != nil {
			fail(err)
		}
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// leftOut returns the mutations that are not drawn, with the reason.
func leftOut(text string) (map[string]string, error) {
	all := map[string]string{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		class, rest, _ := strings.Cut(line, " | ")
		what, reason, ok := strings.Cut(rest, " | ")
		if !ok || !slices.Contains([]string{"equivalent", "performance", "message"}, class) {
			return nil, fmt.Errorf("survivors.txt: %q has not the form CLASS | MUTATION | REASON", line)
		}
		all[what] = class + ": " + reason
	}
	return all, nil
}

// sample tests up to n mutations that compile and prints those that survive.
func sample(pkg string, drawn []mutation, n int, seed uint64, found int) error {
	began := time.Now()
	if result, out, err := test(pkg, 10*time.Minute, nil); err != nil || result != survived {
		return fmt.Errorf("%s: the tests fail without a mutation (%s): %w\n%s", pkg, result, err, out)
	}
	limit := max(time.Minute, 5*time.Since(began))
	counts := map[string]int{}
	tested := func() int { return counts[killed] + counts[timeout] + counts[survived] }
	for _, m := range drawn {
		if n > 0 && tested() == n {
			break
		}
		result, out, err := test(pkg, limit, &m)
		if err != nil {
			return fmt.Errorf("%s: %w\n%s", m, err, out)
		}
		counts[result]++
		if result == survived || result == timeout {
			fmt.Printf("%s %s:%d | %s\n", result, m.path, m.line, m)
		}
	}
	dead := counts[killed] + counts[timeout]
	fmt.Printf("%s: seed %d: %d of %d killed (%d %%), %d of them by the time limit; %d do not compile; "+
		"drawn from %d, of which %d are left out\n", pkg, seed, dead, tested(), 100*dead/max(1, tested()),
		counts[timeout], counts[invalid], found, found-len(drawn))
	return nil
}

// Results of a test.
const (
	killed   = "killed"
	timeout  = "timeout"
	survived = "survived"
	invalid  = "does not compile"
)

// test runs the package's fast tests with a mutation, in a network namespace without links.
func test(pkg string, limit time.Duration, m *mutation) (result, out string, err error) {
	args := []string{
		"test", "-short", "-count=1", "-failfast", "-vet=off", "-ldflags=-s -w",
		"-timeout", limit.String(),
	}
	if m != nil {
		dir, err := os.MkdirTemp("", "mutate-")
		if err != nil {
			return "", "", err
		}
		defer os.RemoveAll(dir)
		overlay, err := m.overlay(dir)
		if err != nil {
			return "", "", err
		}
		args = append(args, "-overlay", overlay)
	}
	// The tests' own limit comes first: this one is for what compiles or ends too slowly.
	ctx, cancel := context.WithTimeout(context.Background(), limit+10*time.Minute)
	defer cancel()
	args = append([]string{"-c", fmt.Sprintf("ulimit -v %d; exec go \"$@\"", memory), "go"}, append(args, pkg)...)
	cmd := exec.CommandContext(ctx, "sh", args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if os.Geteuid() == 0 {
		cmd.SysProcAttr.Cloneflags = syscall.CLONE_NEWNET
	}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = time.Minute
	b, err := cmd.CombinedOutput()
	out = string(b)
	switch {
	case err == nil:
		return survived, out, nil
	case strings.Contains(out, "[build failed]"), strings.Contains(out, "[setup failed]"):
		return invalid, out, nil
	case strings.Contains(out, "panic: test timed out"), ctx.Err() != nil:
		return timeout, out, nil
	case strings.Contains(out, "FAIL"):
		return killed, out, nil
	}
	return "", out, err
}

// overlay writes the changed file and the overlay that names it.
func (m *mutation) overlay(dir string) (string, error) {
	path, err := filepath.Abs(m.path)
	if err != nil {
		return "", err
	}
	source, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	changed := filepath.Join(dir, filepath.Base(path))
	text := slices.Concat(source[:m.from], []byte(m.after), source[m.to:])
	if err := os.WriteFile(changed, text, 0o600); err != nil {
		return "", err
	}
	b, err := json.Marshal(map[string]map[string]string{"Replace": {path: changed}})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	return overlay, os.WriteFile(overlay, b, 0o600)
}

// mutations returns those of a package's files, in order.
func mutations(pkg string) ([]mutation, error) {
	files, err := filepath.Glob(filepath.Join(pkg, "*.go"))
	if err != nil {
		return nil, err
	}
	var all []mutation
	for _, path := range files {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		in, err := inFile(filepath.Clean(path))
		if err != nil {
			return nil, err
		}
		all = append(all, in...)
	}
	// What is there several times in a function is numbered.
	seen := map[string]int{}
	for i := range all {
		seen[all[i].String()]++
		all[i].n = seen[all[i].String()]
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: there is nothing to change", pkg)
	}
	return all, nil
}
