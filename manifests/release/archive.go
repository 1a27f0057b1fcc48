package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// A file is one of an archive.
type file struct {
	name string
	mode int64
	data []byte
}

// tree reads the regular files below a directory, sorted, with a prefix. Only programs,
// which have no extension and are executable, keep that mode.
func tree(dir, prefix string) ([]file, error) {
	var all []file
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := int64(0o644)
		if info.Mode()&0o100 != 0 {
			mode = 0o755
		}
		relative, err := filepath.Rel(dir, name)
		all = append(all, file{prefix + filepath.ToSlash(relative), mode, data})
		return err
	})
	slices.SortFunc(all, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return all, err
}

// pack returns a tar archive of files and their directories, owned by root.
func pack(files []file, at time.Time) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	made := map[string]bool{".": true}
	var directory func(string) error
	directory = func(dir string) error {
		if made[dir] {
			return nil
		}
		made[dir] = true
		if err := directory(path.Dir(dir)); err != nil {
			return err
		}
		return w.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: 0o755, ModTime: at})
	}
	for _, f := range files {
		if err := directory(path.Dir(f.name)); err != nil {
			return nil, err
		}
		header := &tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: at}
		if err := w.WriteHeader(header); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, err
		}
	}
	return out.Bytes(), w.Close()
}

// compress returns data in gzip's format, without name and time.
func compress(data []byte) []byte {
	var out bytes.Buffer
	w, _ := gzip.NewWriterLevel(&out, gzip.BestCompression) // the level exists, and a Buffer takes everything
	_, _ = w.Write(data)
	_ = w.Close()
	return out.Bytes()
}
