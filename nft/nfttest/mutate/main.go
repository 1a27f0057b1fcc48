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
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed survivors.txt
var survivors string

func main() {
	seed := flag.Uint64("seed", 1, "draw this sample")
	n := flag.Int("n", 60, "draw so many mutations of each package, 0: all")
	flag.Parse()
	left, err := leftOut(survivors)
	if err != nil {
		fail(err)
	}
	for _, pkg := range flag.Args() {
		pkg = filepath.Clean(pkg)
		found, err := mutations(pkg)
		if err != nil {
			fail(err)
		}
		var drawn []mutation
		out := 0
		for _, m := range found {
			if left[m.String()] {
				out++
			} else {
				drawn = append(drawn, m)
			}
		}
		if listed := listedOf(left, pkg); listed != out {
			fail(fmt.Errorf("survivors.txt: %d of the mutations of %s do not exist any more", listed-out, pkg))
		}
		random := rand.New(rand.NewPCG(*seed, 0)) //nolint:gosec // has to be reproducible
		random.Shuffle(len(drawn), func(i, j int) { drawn[i], drawn[j] = drawn[j], drawn[i] })
		s := sample{pkg: pkg, counts: map[string]int{}}
		if err := s.run(drawn, *n); err != nil {
			fail(err)
		}
		c := s.counts
		tested := c[killed] + c[endless] + c[survived]
		fmt.Printf("%s: seed %d: %d of %d killed (%d %%), %d of them because the tests did not end; "+
			"%d do not compile; drawn from %d, of which %d are left out\n", pkg, *seed, tested-c[survived], tested,
			100*(tested-c[survived])/max(1, tested), c[endless], c[invalid], len(found), out)
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// leftOut returns the mutations that are not drawn.
func leftOut(text string) (map[string]bool, error) {
	all := map[string]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		class, rest, _ := strings.Cut(line, " | ")
		what, _, ok := strings.Cut(rest, " | ")
		if !ok || !slices.Contains([]string{"equivalent", "performance", "message"}, class) {
			return nil, fmt.Errorf("survivors.txt: %q has not the form CLASS | MUTATION | REASON", line)
		}
		all[what] = true
	}
	return all, nil
}

// listedOf counts the mutations of a package.
func listedOf(left map[string]bool, pkg string) (n int) {
	for what := range left {
		if path, _, _ := strings.Cut(what, " "); filepath.Dir(path) == pkg {
			n++
		}
	}
	return n
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
		in, err := inFile(path)
		if err != nil {
			return nil, err
		}
		all = append(all, in...)
	}
	// What is there several times in a function is numbered.
	seen := map[string]int{}
	for i := range all {
		name := all[i].String()
		seen[name]++
		all[i].n = seen[name]
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s: there is nothing to change", pkg)
	}
	return all, nil
}
