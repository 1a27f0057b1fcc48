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

	"github.com/fsnotify/fsnotify"
)

var (
	seed       = flag.Uint64("seed", 1, "of the random operations")
	operations = flag.Int("operations", 3000, "how many random operations")
)

// TestRandomOperationsEndInTheCurrentContent does random operations on the paths
// of three watchers and everything on their way. After every few of them, the
// last content that each watcher delivers must be what a reader finds. Poll is
// never called.
func TestRandomOperationsEndInTheCurrentContent(t *testing.T) {
	s := newScript(t)
	s.timing = timing{quiet: 10 * time.Millisecond, grace: 2 * time.Millisecond, spacing: 2 * time.Millisecond, arm: defaultTiming().arm}
	random := rand.New(rand.NewPCG(*seed, 0))
	ctx, stop := context.WithCancel(t.Context())
	var followers []*follower
	for _, path := range []string{"/a/b/c", "/a", "/b/../c/a"} {
		f := &follower{read: reader(s.path(path)), path: path}
		f.Watcher = start(ctx, s.timing, newObserver(s.path(path), fsnotify.NewWatcher), f.read)
		followers = append(followers, f)
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
		for _, f := range followers {
			if err := f.catchUp(); err != nil {
				t.Fatalf("seed %d: %s: %v; the last operations:\n%s", *seed, f.path, err,
					strings.Join(log[max(0, len(log)-40):], "\n"))
			}
		}
	}
	stop()
	for _, f := range followers {
		<-f.Done()
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

// A follower compares what a watcher delivered last with the current content.
type follower struct {
	*Watcher[string]
	path string
	read func(place string) (content, fingerprint string)
	last string
	any  bool
}

func (f *follower) catchUp() error {
	want, _ := f.read("")
	timeout := time.After(20 * time.Second)
	for !f.any || f.last != want {
		select {
		case f.last = <-f.Content():
			f.any = true
		case warning := <-f.Warnings():
			if !strings.Contains(warning.Error(), "single file") {
				return warning
			}
		case <-timeout:
			return fmt.Errorf("last delivered %q, but the content is %q", f.last, want)
		}
	}
	return nil
}
