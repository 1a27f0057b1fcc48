package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, path, data string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(data), 0o644); err != nil {
		t.Fatal(err)
	}
}

func link(t *testing.T, target, path string) {
	t.Helper()
	if err := os.Symlink(target, path); err != nil {
		t.Fatal(err)
	}
}

// read returns what Read finds at dir/name, as "name=content" without dir.
func read(t *testing.T, dir, name string) []string {
	t.Helper()
	sources, err := Read(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range sources {
		entry := strings.TrimPrefix(s.Name, dir+"/")
		if entry += "=" + string(s.Data); s.Ignored {
			entry += "ignored"
		}
		got = append(got, entry)
	}
	return got
}

func TestMissingPathHasNoSource(t *testing.T) {
	dir := t.TempDir()
	link(t, "nowhere", filepath.Join(dir, "dangling"))
	if err := os.Mkdir(filepath.Join(dir, "empty"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"absent", "absent/config", "dangling", "empty"} {
		if got := read(t, dir, name); got != nil {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestDirectoryIsReadInNameOrder(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{
		"b.yml", "a.yaml", "ip-masq-agent", "ip-masq.txt", "B.json", "10.yaml", "9.yaml", "README", "notes.txt", "c.YAML",
		".hidden", ".x.yaml", "a.yaml~", "a.yaml.bak", ".a.swp", "a.swp", "sub/c.yaml",
	} {
		write(t, filepath.Join(dir, "d", name), name)
	}
	write(t, filepath.Join(dir, "elsewhere"), "e")
	link(t, "../elsewhere", filepath.Join(dir, "d/linked.yaml"))
	link(t, "../nowhere", filepath.Join(dir, "d/dangling.yaml"))
	link(t, "ring.yaml", filepath.Join(dir, "d/ring.yaml"))
	link(t, "../elsewhere/x", filepath.Join(dir, "d/through-a-file.yaml"))
	link(t, "sub", filepath.Join(dir, "d/linked-directory.yaml"))
	if err := syscall.Mkfifo(filepath.Join(dir, "d/fifo.yaml"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"d/10.yaml=10.yaml", "d/9.yaml=9.yaml", "d/B.json=B.json", "d/README=ignored", "d/a.yaml=a.yaml", "d/b.yml=b.yml",
		"d/c.YAML=ignored", "d/ip-masq-agent=ip-masq-agent", "d/ip-masq.txt=ip-masq.txt", "d/linked.yaml=e",
		"d/notes.txt=ignored",
	}
	if diff := cmp.Diff(want, read(t, dir, "d")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestDirectoryWithOnlyAFileNamedConfigIsRead(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "..1/config"), "x")
	write(t, filepath.Join(dir, "..1/README"), "y")
	link(t, "..1", filepath.Join(dir, "..data"))
	link(t, "..data/config", filepath.Join(dir, "config"))
	link(t, "..data/README", filepath.Join(dir, "README"))
	if diff := cmp.Diff([]string{"README=ignored", "config=x"}, read(t, dir, ".")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	write(t, filepath.Join(dir, "ip-masq-agent"), "z")
	if diff := cmp.Diff([]string{"README=ignored", "config=ignored", "ip-masq-agent=z"}, read(t, dir, ".")); diff != "" {
		t.Errorf("with another file (-want +got):\n%s", diff)
	}
}

func TestNonRegularFilesAreErrorsAndDoNotBlock(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	write(t, filepath.Join(dir, "file"), "x")
	link(t, "loop", filepath.Join(dir, "loop"))
	link(t, "loop", filepath.Join(dir, "link-to-loop"))
	write(t, filepath.Join(dir, "directory/a.yaml"), "x")
	link(t, strings.Repeat("x", 300), filepath.Join(dir, "directory/long.yaml"))
	write(t, filepath.Join(dir, "large"), strings.Repeat("#", maxSize+1))

	tests := []struct{ path, want string }{
		{"fifo", "fifo: not a regular file (named pipe)"},
		{"socket", "socket: not a regular file (socket)"},
		{"/dev/null", "/dev/null: not a regular file (character device)"},
		{"loop", syscall.ELOOP.Error()},
		{"link-to-loop", syscall.ELOOP.Error()},
		{"file/config", syscall.ENOTDIR.Error()},
		{"large", "large:1:1: the file is larger than 4 MiB"},
		{"directory", syscall.ENAMETOOLONG.Error()},
		{strings.Repeat("x", 300), syscall.ENAMETOOLONG.Error()},
	}
	for _, tt := range tests {
		path := tt.path
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		sources, err := Read(path)
		if err == nil || !strings.HasSuffix(err.Error(), tt.want) || sources != nil {
			t.Errorf("%s: %v, %v, want an error ending in %q", tt.path, sources, err, tt.want)
		}
		var system *fs.PathError
		wrapped := errors.As(err, &system) && errors.Is(err, syscall.ELOOP)
		if tt.want == syscall.ELOOP.Error() && !wrapped {
			t.Errorf("%s: %v does not wrap the error of the system", tt.path, err)
		}
	}
}

func TestDirectorySizeIsBounded(t *testing.T) {
	dir := t.TempDir()
	for i := range maxFiles {
		write(t, filepath.Join(dir, "many", fmt.Sprint(i)), "")
	}
	if got := read(t, dir, "many"); len(got) != maxFiles {
		t.Errorf("%d files", len(got))
	}
	write(t, filepath.Join(dir, "many/one-more"), "")
	write(t, filepath.Join(dir, "large/a.yaml"), strings.Repeat("#", maxSize-5))
	write(t, filepath.Join(dir, "large/b.yaml"), "# five")
	for name, want := range map[string]string{
		"many":  "many: more than 1000 entries: a directory of config files has fewer",
		"large": "large/b.yaml:1:1: with this file, the files are larger than 4 MiB together",
	} {
		sources, err := Read(filepath.Join(dir, name))
		if err == nil || !strings.HasSuffix(err.Error(), want) || sources != nil {
			t.Errorf("%s: %d sources, %v, want an error ending in %q", name, len(sources), err, want)
		}
	}
}

func TestDirectoryIsReadAgainOnlyWhileItChanges(t *testing.T) {
	for changes, want := range map[int]int{0: 1, 1: 2, readTries - 1: readTries, 100: readTries} {
		dir, reads := t.TempDir(), 0
		sources, err := readConsistent(dir, func(string) ([]Source, error) {
			if reads++; reads <= changes { // as the kubelet swaps a volume
				link(t, fmt.Sprintf("..%d", reads), filepath.Join(dir, "..new"))
				if err := os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")); err != nil {
					return nil, err
				}
			}
			return []Source{{Name: fmt.Sprint(reads)}}, nil
		})
		if err != nil || reads != want || len(sources) != 1 || sources[0].Name != fmt.Sprint(want) {
			t.Errorf("%d changes: %d reads, want %d, of which the last counts: %v, %v", changes, reads, want, sources, err)
		}
	}
}

func TestControlCharactersInFileNamesAreEscaped(t *testing.T) {
	dir := t.TempDir()
	hostile := "\x1b[2J\n\x9b\u202e.yaml"
	write(t, filepath.Join(dir, "d", hostile), "a: b\nfoo: [")
	write(t, filepath.Join(dir, "d", hostile+".txt"), "")
	write(t, filepath.Join(dir, hostile), "")
	link(t, hostile, filepath.Join(dir, hostile+"loop"))
	for name, want := range map[string]string{
		"a é": "a é", "a\n": `a\n`, "\xff": `\xff`, "\u202e": `\u202e`, `a"`: `a"`, "a\"\x00": `a\"\x00`,
	} {
		if got := Printable(name); got != want {
			t.Errorf("%q: %s, want %s", name, got, want)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, hostile+"fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	sources, err := Read(filepath.Join(dir, "d"))
	if err != nil {
		t.Fatal(err)
	}
	sources = append(sources, Source{Name: hostile, Data: []byte("x: ")})
	_, problems := Parse(Defaults{}, sources...)
	texts := []string{problems.Faults().Error(), problems.Remarks().Error()}
	for _, s := range sources[:2] {
		texts = append(texts, s.Name)
	}
	for _, name := range []string{hostile + "/x", hostile + "fifo", hostile + strings.Repeat("x", 300)} {
		_, err := Read(filepath.Join(dir, name))
		texts = append(texts, fmt.Sprint(err))
	}
	for _, text := range texts {
		if !strings.Contains(text, `\x1b[2J\n\x9b\u202e`) || strings.ContainsAny(text, "\x1b\u009b\u202e") {
			t.Errorf("%q", text)
		}
	}
}

func TestStandardInputIsRead(t *testing.T) {
	sources, err := ReadFrom(strings.NewReader("a: b"), "in")
	if err != nil || len(sources) != 1 || sources[0].Name != "in" || string(sources[0].Data) != "a: b" {
		t.Error(sources, err)
	}
	large := io.LimitReader(strings.NewReader(strings.Repeat("#", 2*maxSize)), 2*maxSize)
	if sources, err = ReadFrom(large, "in"); err != nil || len(sources[0].Data) != maxSize+1 {
		t.Error(len(sources), err)
	}
	if _, err := ReadFrom(iotest.ErrReader(io.ErrUnexpectedEOF), "in"); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}
