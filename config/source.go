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
	"strings"
	"syscall"
)

// A Source is the content of one file and the name by which positions call it.
type Source struct {
	Name string
	Data []byte
}

// readTries bounds how often a directory is read whose content the kubelet
// swaps meanwhile.
const readTries = 3

// Read returns the file at path, or, if a directory is there, its regular files
// by name, links followed, without those whose name begins with a dot or ends
// in ~, .bak or .swp. Nothing there is no error and no source. What is neither
// file nor directory is an error, and never opened; so is a file in the place
// of a parent directory, and a file of more than 4 MiB.
func Read(path string) ([]Source, error) {
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("config: %w", err)
	case info.IsDir():
		return readWhole(path, readEntries)
	case !info.Mode().IsRegular():
		return nil, notRegular(path, info)
	}
	s, err := readRegular(path)
	if err != nil || s == nil {
		return nil, err
	}
	return []Source{*s}, nil
}

// readWhole reads a directory, once more where the link ..data, which volumes
// have, was exchanged meanwhile: files of two versions of a ConfigMap are no
// configuration.
func readWhole(path string, read func(string) ([]Source, error)) ([]Source, error) {
	for try := 1; ; try++ {
		before, _ := os.Readlink(filepath.Join(path, "..data"))
		sources, err := read(path)
		after, _ := os.Readlink(filepath.Join(path, "..data"))
		if before == after || try == readTries {
			return sources, err
		}
	}
}

func readEntries(path string) ([]Source, error) {
	entries, err := os.ReadDir(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	var sources []Source
	for _, e := range entries { // sorted by name
		name := filepath.Join(path, e.Name())
		if ignored(e.Name()) {
			continue
		}
		info, err := os.Stat(name)
		// A link that leads nowhere, into itself or through a file is no file.
		leadsNowhere := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ELOOP) || errors.Is(err, syscall.ENOTDIR)
		if leadsNowhere || err == nil && !info.Mode().IsRegular() {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("config: %w", err)
		}
		s, err := readRegular(name)
		if err != nil {
			return nil, err
		}
		if s != nil {
			sources = append(sources, *s)
		}
	}
	return sources, nil
}

// ignored reports whether a directory entry is hidden, or what an editor leaves.
func ignored(name string) bool {
	return strings.HasPrefix(name, ".") ||
		slices.ContainsFunc([]string{"~", ".bak", ".swp"}, func(s string) bool { return strings.HasSuffix(name, s) })
}

// readRegular reads a file, or returns nil where it has vanished. Should
// something else have taken its place, opening that does not block.
func readRegular(path string) (*Source, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	} else if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if !info.Mode().IsRegular() {
		return nil, notRegular(path, info)
	}
	var data bytes.Buffer
	data.Grow(int(min(info.Size(), maxSize)) + bytes.MinRead)
	if _, err := data.ReadFrom(io.LimitReader(f, maxSize+1)); err != nil {
		return nil, fmt.Errorf("config: %w", err)
	}
	if data.Len() > maxSize {
		return nil, Problems{tooLarge(path)}
	}
	return &Source{Name: path, Data: data.Bytes()}, nil
}

func notRegular(path string, info fs.FileInfo) error {
	return fmt.Errorf("config: %s: not a file, but of mode %s", path, info.Mode())
}

func tooLarge(path string) Problem {
	return Problem{Pos: Position{File: path, Line: 1, Col: 1}, Msg: "the file is larger than 4 MiB"}
}
