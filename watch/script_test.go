package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const scripts = "../testdata/watch"

// TestScripts plays testdata/watch/*.txt. Each line is a command and its
// arguments; see README.txt there. Paths are relative to a separate root for each
// script.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob(scripts + "/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts in %s: %v", scripts, err)
	}
	plain, alone := map[string]string{}, map[string]string{}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		switch name := strings.TrimSuffix(filepath.Base(file), ".txt"); {
		case name == "README":
		case forAll.Match(text):
			alone[name] = string(text)
		default:
			plain[name] = string(text)
		}
	}
	t.Run("plain", func(t *testing.T) {
		for name, text := range plain {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				newPlayer(t).play(text)
			})
		}
	})
	for name, text := range alone {
		t.Run("alone/"+name, func(t *testing.T) { newPlayer(t).play(text) })
	}
}

// forAll matches the commands that affect other scripts too.
var forAll = regexp.MustCompile(`(?m)^(limit-watches|limit-instances) `)

// A player plays a script.
type player struct {
	*testing.T
	root   string
	timing timing
	*following
}

// A following is a follower that runs.
type following struct {
	*follower
	content chan string
	ended   chan struct{}
}

// timing is what tests change of a follower.
type timing struct {
	poll, quiet, gap time.Duration
	share            int
}

func start(ctx context.Context, p timing, path string) *following {
	f := &following{content: make(chan string, 1), ended: make(chan struct{})}
	o := newChecker(path, reader(path), f.content)
	f.follower = newFollower(o)
	f.poll, f.quiet, f.fewerFiles, f.share = p.poll, p.quiet, p.gap, p.share
	go func() {
		defer close(f.ended)
		f.run(ctx)
	}()
	return f
}

func newPlayer(t *testing.T) *player {
	root, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unmountAll(t, root) })
	// Scripts distinguish complete from partial content by what is delivered, not
	// by when: a longer quiet time makes them reliable on a busy machine.
	patient := timing{poll: time.Hour, quiet: 300 * time.Millisecond}
	if testing.Short() {
		patient.quiet = 150 * time.Millisecond
	}
	patient.gap = patient.quiet
	return &player{T: t, root: root, timing: patient}
}

func (s *player) play(text string) {
	ctx, stop := context.WithCancel(s.Context())
	for i, line := range strings.Split(text, "\n") {
		args := strings.Fields(line)
		if len(args) == 0 || args[0][0] == '#' {
			continue
		}
		var err error
		if command, ok := commands[args[0]]; ok {
			err = command(s, args[1:])
		} else {
			err = s.command(ctx, args[0], strings.Join(args[1:], " "))
		}
		if err != nil {
			s.Fatalf("line %d: %s: %v", i+1, line, err)
		}
	}
	stop()
	<-s.ended
}

// command executes the commands that concern the watcher.
func (s *player) command(ctx context.Context, name, rest string) error {
	switch name {
	case "only-at-once":
		s.timing.quiet = time.Hour
		s.timing.gap = time.Hour
	case "polls":
		s.timing.poll = 50 * time.Millisecond
	case "watch":
		s.following = start(ctx, s.timing, s.path(rest))
	case "poll":
		s.checker.reread()
	case "expect":
		return receive(s, s.content, func(got string) error {
			if got != rest {
				return fmt.Errorf("got %q", got)
			}
			return nil
		})
	case "watches":
		got := s.checker.inotify.WatchList()
		for i := range got {
			got[i] = strings.TrimPrefix(got[i], s.root)
		}
		slices.Sort(got)
		if !slices.Equal(got, strings.Fields(rest)) {
			return fmt.Errorf("watched are %q", got)
		}
	default:
		return errors.New("no such command")
	}
	return nil
}

func receive[T any](s *player, c <-chan T, check func(T) error) error {
	select {
	case got := <-c:
		return check(got)
	case <-time.After(time.Minute):
		return errors.New("nothing delivered")
	case <-s.Context().Done():
		return s.Context().Err()
	}
}

func (s *player) path(p string) string { return s.root + p }

// commands are the commands that change files. The random test uses them too.
var commands = map[string]func(s *player, args []string) error{
	"mkdir": func(s *player, args []string) error { return os.MkdirAll(s.path(args[0]), 0o755) },
	"rm":    func(s *player, args []string) error { return os.RemoveAll(s.path(args[0])) },
	"write": func(s *player, args []string) error {
		return os.WriteFile(s.path(args[0]), []byte(strings.Join(args[1:], " ")), 0o644)
	},
	"append": func(s *player, args []string) error {
		f, err := os.OpenFile(s.path(args[0]), os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteString(strings.Join(args[1:], " "))
		return err
	},
	"truncate": func(s *player, args []string) error { return os.Truncate(s.path(args[0]), 0) },
	"rename":   func(s *player, args []string) error { return os.Rename(s.path(args[0]), s.path(args[1])) },
	"exchange": func(s *player, args []string) error {
		return unix.Renameat2(unix.AT_FDCWD, s.path(args[0]), unix.AT_FDCWD, s.path(args[1]), unix.RENAME_EXCHANGE)
	},
	"link": func(s *player, args []string) error { return os.Link(s.path(args[0]), s.path(args[1])) },
	"symlink": func(s *player, args []string) error {
		if filepath.IsAbs(args[0]) {
			args[0] = s.path(args[0])
		}
		return os.Symlink(args[0], s.path(args[1]))
	},
	"bind": func(s *player, args []string) error {
		return s.mount(s.path(args[0]), s.path(args[1]), "", unix.MS_BIND)
	},
	"tmpfs":  func(s *player, args []string) error { return s.mount("tmpfs", s.path(args[0]), "tmpfs", 0) },
	"umount": func(s *player, args []string) error { return unix.Unmount(s.path(args[0]), unix.MNT_DETACH) },

	"limit-watches":   func(s *player, args []string) error { return limit(s, "max_inotify_watches", args[0]) },
	"limit-instances": func(s *player, args []string) error { return limit(s, "max_inotify_instances", args[0]) },
}

func (s *player) mount(source, target, fstype string, flags uintptr) error {
	needNamespace(s, "mount")
	return unix.Mount(source, target, fstype, flags, "")
}

// limit sets a limit of the user namespace, and restores it after the test.
func limit(t testing.TB, name, number string) error {
	needNamespace(t, "user")
	file := "/proc/sys/user/" + name
	old, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	t.Cleanup(func() { check(t, os.WriteFile(file, old, 0)) })
	return os.WriteFile(file, []byte(number), 0)
}

// unmountAll unmounts everything below a directory. A mount can hide another, so
// it repeats until a round unmounts nothing.
func unmountAll(t testing.TB, dir string) {
	for done := true; done; {
		done = false
		table, err := os.ReadFile("/proc/self/mountinfo")
		check(t, err)
		for _, line := range slices.Backward(strings.Split(string(table), "\n")) {
			fields := strings.Fields(line)
			if len(fields) > 4 && strings.HasPrefix(fields[4], dir+"/") {
				done = unix.Unmount(fields[4], unix.MNT_DETACH) == nil || done
			}
		}
	}
}

// reader reads a file, or a directory of files, as one line; "nothing" if missing
// or unreadable.
func reader(path string) func() (content, fingerprint string, present int) {
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			return "nothing"
		}
		return string(b)
	}
	return func() (string, string, int) {
		entries, err := os.ReadDir(path)
		if err != nil {
			content := read(path)
			if content == "nothing" || content == "" {
				return content, content, 0
			}
			return content, content, 1
		}
		var all []string
		for _, entry := range entries {
			if content := read(path + "/" + entry.Name()); content != "nothing" {
				all = append(all, entry.Name()+"="+content)
			}
		}
		content := cmp.Or(strings.Join(all, " "), "nothing")
		return content, content, len(all)
	}
}
