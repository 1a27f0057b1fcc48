package config

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/script"
)

func write(t *testing.T, path, data string) {
	t.Helper()
	nfttest.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	nfttest.NoError(t, os.WriteFile(path, []byte(data), 0o644))
}

func link(t *testing.T, target, path string) {
	t.Helper()
	nfttest.NoError(t, os.Symlink(target, path))
}

// Each case of testdata/config/trees.txt makes files in a directory, and reads some of them.
func TestTreesAreReadAsTheirRowsSay(t *testing.T) {
	script.Golden(t, corpusFile("trees"), *update, func(t *testing.T, c *script.Case) {
		dir := t.TempDir()
		long := strings.Repeat("x", 300)
		for _, s := range c.Steps {
			words := append(strings.Fields(strings.ReplaceAll(s.Line, "LONG", long)), "")
			path := filepath.Join(dir, words[1])
			operands := strings.TrimSpace(strings.Join(words[2:], " "))
			switch words[0] {
			case "write":
				write(t, path, operands)
			case "large":
				write(t, path, strings.Repeat("#", nfttest.Must(strconv.Atoi(operands))))
			case "many":
				for i := range nfttest.Must(strconv.Atoi(operands)) {
					write(t, filepath.Join(path, fmt.Sprint(i)), "")
				}
			case "link":
				link(t, words[1], filepath.Join(dir, operands))
			case "mkdir":
				nfttest.Check(os.Mkdir(path, 0o755))
			case "fifo":
				nfttest.Check(syscall.Mkfifo(path, 0o644))
			case "socket":
				defer nfttest.Must(net.Listen("unix", path)).Close()
			case "read":
				if filepath.IsAbs(words[1]) {
					path = words[1]
				}
				s.Say(strings.NewReplacer(dir, "DIR", long, "LONG").Replace(found(path)))
			default:
				s.Unknown(t)
			}
		}
	})
}

// found says what Read finds, of many files how many.
func found(path string) string {
	sources, err := Read(path)
	if err != nil {
		if errors.As(err, new(*fs.PathError)) {
			return fmt.Sprintf("%v, an error of the system\n", err)
		}
		return fmt.Sprintf("%v\n", err)
	}
	if len(sources) > 100 {
		return fmt.Sprintf("%d files\n", len(sources))
	}
	var b strings.Builder
	for _, s := range sources {
		fmt.Fprintf(&b, "%s: %.10s, %d bytes, ignored: %t\n", s.Name, s.Data, len(s.Data), s.Ignored)
	}
	return b.String()
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
	nfttest.NoError(t, syscall.Mkfifo(filepath.Join(dir, hostile+"fifo"), 0o644))
	sources, err := Read(filepath.Join(dir, "d"))
	nfttest.NoError(t, err)
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
			t.Errorf("%q has a control character of a file's name, or not its escape", text)
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
