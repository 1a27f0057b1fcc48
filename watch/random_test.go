package watch

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"
)

var (
	seed       = flag.Uint64("seed", 1, "of the random operations")
	operations = flag.Int("operations", 3000, "how many random operations")
)

// TestRandomOperationsEndInTheCurrentContent does random operations on the paths
// of some followers, absolute and relative ones, and everything on their way. After every few of them, the
// last content that each delivers must be what a reader finds.
func TestRandomOperationsEndInTheCurrentContent(t *testing.T) {
	s := newPlayer(t)
	t.Chdir(s.root)
	p := timing{poll: 20 * time.Millisecond, quiet: 10 * time.Millisecond, gap: 10 * time.Millisecond}
	random := rand.New(rand.NewPCG(*seed, 0))
	ctx, stop := context.WithCancel(t.Context())
	var readers []*lastReader
	for _, path := range []string{s.path("/a/b/c"), s.path("/a"), s.path("/b/../c/a"), "b/a", "./c/../a/c"} {
		readers = append(readers, &lastReader{following: start(ctx, p, path), path: path, read: reader(path)})
	}
	var log []string
	most := *operations
	if testing.Short() {
		most /= 10
	}
	for done := 0; done < most; {
		for range 1 + random.IntN(8) {
			args := strings.Fields(randomOperation(random))
			result := "done"
			if err := commands[args[0]](s, args[1:]); err != nil {
				result = "failed" // as expected: the paths are random
			}
			log = append(log, strings.Join(args, " ")+": "+result)
			done++
		}
		for _, f := range readers {
			if err := f.catchUp(); err != nil {
				t.Fatalf("seed %d: %s: %v; the last operations:\n%s", *seed, f.path, err,
					strings.Join(log[max(0, len(log)-40):], "\n"))
			}
		}
	}
	stop()
	for _, f := range readers {
		<-f.ended
	}
}

// randomOperation returns a line of a script.
func randomOperation(r *rand.Rand) string {
	path := func() string {
		var b strings.Builder
		for range 1 + r.IntN(3) {
			b.WriteString("/" + string("abc"[r.IntN(3)]))
		}
		return b.String()
	}
	content := func() string { return fmt.Sprint(r.IntN(1000)) }
	words := []string{
		"mkdir", "mkdir", "mkdir", "write", "write", "write", "write", "append", "truncate", "rename", "rename",
		"rename", "exchange", "symlink", "symlink", "rm",
	}
	if os.Getenv(ownNamespaces) != "" {
		words = append(words, "bind", "tmpfs", "umount", "umount")
	}
	switch word := words[r.IntN(len(words))]; word {
	case "write", "append":
		return word + " " + path() + " " + content()
	case "symlink":
		// No "..": it could lead out of the script's root.
		target := path()
		if r.IntN(2) == 0 {
			target = target[1:]
		}
		return word + " " + target + " " + path()
	case "rename", "exchange", "bind":
		return word + " " + path() + " " + path()
	default:
		return word + " " + path()
	}
}

// A lastReader compares what was delivered last with the current content.
type lastReader struct {
	*following
	path string
	read func() (content, fingerprint string, present int)
	last string
	any  bool
}

func (r *lastReader) catchUp() error {
	want, _, _ := r.read()
	timeout := time.After(2 * time.Minute)
	for !r.any || r.last != want {
		select {
		case r.last = <-r.content:
			r.any = true
		case <-timeout:
			return fmt.Errorf("last delivered %q, but the content is %q", r.last, want)
		}
	}
	return nil
}
