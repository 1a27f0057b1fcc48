// Command mutate shows how much a package's own fast tests see: it changes one condition
// or drops one statement at a time, and counts the changes that make these tests fail.
//
//	go run ./nft/nfttest/mutate [flags] PACKAGE...
//
// The sample is drawn at random, by -seed. What no test can be asked to see is listed with
// its reason in survivors.txt, and not drawn. The files themselves are never changed: a test
// program has many mutations (go test -overlay), of which the environment turns on one.
package main

import (
	_ "embed"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"nft-masq-agent/nft/nfttest"
)

//go:embed survivors.txt
var survivors string

func main() {
	seed := flag.Uint64("seed", 1, "draw this sample")
	n := flag.Int("n", 60, "draw so many mutations of each package, 0: all")
	in := flag.String("in", "", "draw only from files whose names match this pattern")
	flag.Parse()
	err := nfttest.Part(func() {
		left := leftOut(survivors)
		for _, pkg := range flag.Args() {
			mutate(filepath.Clean(pkg), left, regexp.MustCompile(*in), *seed, *n)
		}
	})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// mutate draws mutations of a package's files that are not left out, tests them, and prints what was seen.
func mutate(pkg string, left map[string]bool, in *regexp.Regexp, seed uint64, n int) {
	found := mutations(pkg)
	var drawn []mutation
	gone := maps.Clone(left)
	for _, m := range found {
		delete(gone, m.String())
		if !left[m.String()] {
			drawn = append(drawn, m)
		}
	}
	for what := range gone {
		if path, _, _ := strings.Cut(what, " "); filepath.Dir(path) == pkg {
			fmt.Printf("survivors.txt has a mutation that does not exist any more: %s\n", what)
		}
	}
	out := len(found) - len(drawn)
	drawn = slices.DeleteFunc(drawn, func(m mutation) bool { return !in.MatchString(filepath.Base(m.path)) })
	random := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // has to be reproducible
	random.Shuffle(len(drawn), func(i, j int) { drawn[i], drawn[j] = drawn[j], drawn[i] })
	s := sample{pkg: pkg, counts: map[string]int{}}
	s.run(drawn, n)
	c := s.counts
	tested := c[killed] + c[endless] + c[survived]
	fmt.Printf("%s: seed %d: %d of %d killed (%d %%), %d of them because the tests did not end; "+
		"%d do not compile; drawn from %d, of which %d are left out\n", pkg, seed, tested-c[survived], tested,
		100*(tested-c[survived])/max(1, tested), c[endless], c[invalid], len(found), out)
}

// leftOut returns the mutations that are not drawn.
func leftOut(text string) map[string]bool {
	all := map[string]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		parts := strings.Split(line, " | ")
		if len(parts) < 3 || !slices.Contains([]string{"equivalent", "performance", "message"}, parts[0]) {
			nfttest.Check(fmt.Errorf("survivors.txt: %q has not the form CLASS | MUTATION | REASON", line))
		}
		all[parts[1]] = true
	}
	return all
}

// mutations returns those of a package's files, in order.
func mutations(pkg string) (all []mutation) {
	for _, path := range nfttest.Must(filepath.Glob(filepath.Join(pkg, "*.go"))) {
		if !strings.HasSuffix(path, "_test.go") {
			all = append(all, inFile(path)...)
		}
	}
	// What is there several times in a function is numbered.
	seen := map[string]int{}
	for i := range all {
		name := all[i].String()
		seen[name]++
		all[i].n = seen[name]
	}
	if len(all) == 0 {
		nfttest.Check(fmt.Errorf("%s: there is nothing to change", pkg))
	}
	return all
}
