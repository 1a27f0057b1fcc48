package config

import (
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

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

// read returns what Read finds at dir/name, as "name=content" with dir left out.
func read(t *testing.T, dir, name string) []string {
	t.Helper()
	sources, err := Read(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range sources {
		got = append(got, strings.TrimPrefix(s.Name, dir+"/")+"="+string(s.Data))
	}
	return got
}

func TestNothingThereIsNoSource(t *testing.T) {
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

func TestAFileIsReadThroughLinks(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "..2024/config"), "x")
	link(t, "..2024", filepath.Join(dir, "..data"))
	link(t, "..data/config", filepath.Join(dir, "config"))
	if diff := cmp.Diff([]string{"config=x"}, read(t, dir, "config")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestADirectoryGivesItsRegularFilesByName(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b", "a", "B", "10", "9", ".hidden", "a~", "a.bak", ".a.swp", "a.swp", "sub/c"} {
		write(t, filepath.Join(dir, "d", name), name)
	}
	write(t, filepath.Join(dir, "elsewhere"), "e")
	link(t, "../elsewhere", filepath.Join(dir, "d/linked"))
	link(t, "../nowhere", filepath.Join(dir, "d/dangling"))
	link(t, "ring", filepath.Join(dir, "d/ring"))
	link(t, "../elsewhere/x", filepath.Join(dir, "d/through-a-file"))
	link(t, "sub", filepath.Join(dir, "d/linked-directory"))
	if err := syscall.Mkfifo(filepath.Join(dir, "d/fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	want := []string{"d/10=10", "d/9=9", "d/B=B", "d/a=a", "d/b=b", "d/linked=e"}
	if diff := cmp.Diff(want, read(t, dir, "d")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestADirectoryIsNotReadAcrossASwap(t *testing.T) {
	dir := t.TempDir()
	for _, version := range []string{"..1", "..2"} {
		write(t, filepath.Join(dir, version, "a"), version)
		write(t, filepath.Join(dir, version, "b"), version)
	}
	link(t, "..1", filepath.Join(dir, "..data"))
	link(t, "..data/a", filepath.Join(dir, "a"))
	link(t, "..data/b", filepath.Join(dir, "b"))

	reads := 0
	sources, err := readWhole(dir, func(path string) ([]Source, error) {
		if reads++; reads > 1 {
			return readEntries(path)
		}
		a, err := readRegular(filepath.Join(path, "a"))
		if err != nil {
			return nil, err
		}
		link(t, "..2", filepath.Join(dir, "..new"))
		if err := os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")); err != nil {
			return nil, err
		}
		b, err := readRegular(filepath.Join(path, "b"))
		return []Source{*a, *b}, err
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, s := range sources {
		got = append(got, string(s.Data))
	}
	if diff := cmp.Diff([]string{"..2", "..2"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestWhatIsNoFileIsAnErrorAndDoesNotBlock(t *testing.T) {
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
	write(t, filepath.Join(dir, "large"), strings.Repeat("#", maxSize+1))

	tests := []struct{ path, want string }{
		{"fifo", "fifo: not a file, but of mode prw-r--r--"},
		{"socket", "socket: not a file, but of mode Srwxr-xr-x"},
		{"/dev/null", "/dev/null: not a file, but of mode Dcrw-rw-rw-"},
		{"loop", syscall.ELOOP.Error()},
		{"link-to-loop", syscall.ELOOP.Error()},
		{"file/config", syscall.ENOTDIR.Error()},
		{"large", "large:1:1: the file is larger than 4 MiB"},
		{strings.Repeat("x", 300), syscall.ENAMETOOLONG.Error()},
	}
	for _, tt := range tests {
		path := tt.path
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		sources, err := Read(path)
		if err == nil || !strings.HasSuffix(err.Error(), tt.want) || sources != nil {
			t.Errorf("%s: %v, %v, want an error that ends in %q", tt.path, sources, err, tt.want)
		}
	}
}

func TestErrorsOfTheSystemCanBeTold(t *testing.T) {
	dir := t.TempDir()
	link(t, "loop", filepath.Join(dir, "loop"))
	_, err := Read(filepath.Join(dir, "loop"))
	var path *fs.PathError
	if !errors.Is(err, syscall.ELOOP) || !errors.As(err, &path) {
		t.Errorf("got %v", err)
	}
}
