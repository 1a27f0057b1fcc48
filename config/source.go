package config

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unicode"
	"unicode/utf8"
)

// A Source is the content of one file and the name that positions show for it.
type Source struct {
	Name string `json:"name"`
	Data []byte `json:"data"`

	// Joined marks a file in a directory. The agents that read directories ignore
	// the keys resyncInterval and cidrLimit, so mistakes in them are warnings.
	Joined bool `json:"joined"`
	// Ignored marks a file in a directory that was not read because of its name.
	Ignored bool `json:"ignored"`
}

// Count returns how many sources are read and not empty. Without any the defaults apply.
func Count(sources []Source) (n int) {
	for _, s := range sources {
		if !s.Ignored && len(bytes.TrimSpace(s.Data)) > 0 {
			n++
		}
	}
	return n
}

const (
	maxSize = 4 << 20 // of all sources, in bytes
	// maxFiles bounds the entries of a directory.
	maxFiles = 1000
	// readTries bounds how often a directory is read again because the kubelet
	// swapped its content in the meantime.
	readTries = 3
)

// Read returns the file at path or, if path is a directory, its regular files
// sorted by name. It follows links, and skips names that begin with a dot or end
// in ~, .bak or .swp. In a directory it reads only files whose name begins with
// ip-masq or ends in .yaml, .yml or .json, or, if there are none, the one named
// config; the others are marked Ignored. What is neither a file nor a directory is
// never opened. If there is no file, the error is [ErrMissing], with the reason.
// Further errors are: more than 4 MiB in total, and a directory with more than 1,000
// entries. On a file system that does not answer, Read does not return.
func Read(path string) ([]Source, error) {
	sources, err := readPath(path)
	if isAbsence(err) {
		var system *fs.PathError
		if errors.As(err, &system) {
			err = system.Err
		}
		return nil, missing(path, err.Error())
	}
	return sources, err
}

// ErrMissing is the error of [Read] if there is no config file at the path: nothing, a link
// that leads nowhere or to itself, a directory without entries, or anything that is
// neither a file nor a directory.
var ErrMissing = errors.New("no config file")

const notRegular = "it is neither a file nor a directory"

func missing(path, reason string) error {
	return fmt.Errorf("%w at %s: %s", ErrMissing, Printable(path), reason)
}

// isAbsence reports whether a path leads to nothing: also by a link to itself, or through
// a file.
func isAbsence(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENOTDIR)
}

func readPath(path string) ([]Source, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, readError(err)
	case info.IsDir():
		sources, err := readConsistent(path, readEntries)
		if err == nil && len(sources) == 0 {
			err = missing(path, "the directory is empty")
		}
		return sources, err
	case !info.Mode().IsRegular():
		return nil, missing(path, notRegular)
	}
	s, err := readRegular(path, maxSize)
	if err != nil {
		return nil, err
	}
	return []Source{s}, nil
}

// readConsistent reads a directory, again if the ..data link of a Kubernetes
// volume was swapped in the meantime: files of two versions of a ConfigMap must
// not be mixed.
func readConsistent(path string, read func(string) ([]Source, error)) ([]Source, error) {
	for try := 1; ; try++ {
		version, _ := os.Readlink(filepath.Join(path, "..data"))
		sources, err := read(path)
		current, _ := os.Readlink(filepath.Join(path, "..data"))
		if version == current || try == readTries {
			return sources, err
		}
	}
}

func readEntries(path string) ([]Source, error) {
	names, err := entryNames(path)
	if err != nil {
		return nil, err
	}
	names = slices.DeleteFunc(names, func(name string) bool { return matches(name, ".*", "*~", "*.bak", "*.swp") })
	// Azure's agent reads names that begin with ip-masq. If the volume of
	// ip-masq-agent's ConfigMap was mounted without items, the name is config.
	patterns := []string{"ip-masq*", "*.yaml", "*.yml", "*.json"}
	if !slices.ContainsFunc(names, func(name string) bool { return matches(name, patterns...) }) {
		patterns = []string{"config"}
	}
	remaining := maxSize
	var sources []Source
	for _, name := range names {
		full := filepath.Join(path, name)
		info, err := os.Stat(full)
		if isAbsence(err) || err == nil && !info.Mode().IsRegular() {
			continue
		} else if err != nil {
			return nil, readError(err)
		}
		if !matches(name, patterns...) {
			sources = append(sources, Source{Name: Printable(full), Joined: true, Ignored: true})
			continue
		}
		s, err := readRegular(full, remaining)
		if isAbsence(err) || errors.Is(err, ErrMissing) {
			continue
		} else if err != nil {
			return nil, err
		}
		s.Joined = true
		sources = append(sources, s)
		remaining -= len(s.Data)
	}
	return sources, nil
}

// entryNames returns the names in a directory, sorted.
func entryNames(path string) ([]string, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, readError(err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(maxFiles + 1)
	switch {
	case errors.Is(err, io.EOF):
		return nil, nil
	case err != nil:
		return nil, readError(err)
	case len(names) > maxFiles:
		return nil, fmt.Errorf("config: %s: more than %d entries: a directory of config files has fewer", Printable(path),
			maxFiles)
	}
	slices.Sort(names)
	return names, nil
}

func matches(name string, patterns ...string) bool {
	return slices.ContainsFunc(patterns, func(pattern string) bool {
		ok, _ := filepath.Match(pattern, name)
		return ok
	})
}

// readRegular reads a file up to a size. If something else has taken its place,
// opening it does not block.
func readRegular(path string, limit int) (s Source, err error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return s, readError(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return s, readError(err)
	}
	if !info.Mode().IsRegular() {
		return s, missing(path, notRegular)
	}
	var data bytes.Buffer
	data.Grow(int(min(info.Size(), int64(limit))) + bytes.MinRead)
	if _, err := data.ReadFrom(io.LimitReader(f, int64(limit)+1)); err != nil {
		return s, readError(err)
	}
	if data.Len() > limit {
		return s, Problems{tooLarge(Printable(path), limit < maxSize)}
	}
	return Source{Name: Printable(path), Data: data.Bytes()}, nil
}

func tooLarge(name string, joined bool) Problem {
	msg := "the file is larger than 4 MiB"
	if joined {
		msg = "with this file, the files are larger than 4 MiB together"
	}
	return Problem{ID: "tooLarge", Pos: Position{name, 1, 1}, Msg: msg}
}

// readError wraps an error of the operating system, with control characters escaped.
func readError(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		err = &fs.PathError{Op: path.Op, Path: Printable(path.Path), Err: path.Err}
	}
	return fmt.Errorf("config: %w", err)
}

// Printable returns a file name with all unprintable characters escaped.
func Printable(name string) string {
	if !strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || r == utf8.RuneError }) {
		return name
	}
	quoted := strconv.Quote(name)
	return quoted[1 : len(quoted)-1]
}
