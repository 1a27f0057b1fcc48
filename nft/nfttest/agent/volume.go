package agent

import (
	"fmt"
	"os"
	"path/filepath"
)

// A Volume is a ConfigMap volume as the kubelet mounts it: the file is a link
// through ..data, which is switched to another directory when the content
// changes.
type Volume struct {
	dir     string
	version int
}

// configName is the name of the file in the volume.
const configName = "ip-masq-agent"

// NewVolume returns a volume in an empty directory.
func NewVolume(dir string) *Volume { return &Volume{dir: dir} }

// Path returns the path of the file.
func (v *Volume) Path() string { return filepath.Join(v.dir, configName) }

// Prepare writes the next content of the file, and returns a function that makes
// it visible. With nil, the volume has no file.
func (v *Volume) Prepare(text []byte) (swap func() error, err error) {
	v.version++
	next, data := fmt.Sprintf("..%d", v.version), filepath.Join(v.dir, "..data")
	err = os.Mkdir(filepath.Join(v.dir, next), 0o755)
	if err == nil && text != nil {
		err = os.WriteFile(filepath.Join(v.dir, next, configName), text, 0o644)
	}
	if err == nil && v.version == 1 {
		err = os.Symlink(filepath.Join("..data", configName), v.Path())
	}
	if err != nil {
		return nil, err
	}
	if err := os.Symlink(next, data+"_tmp"); err != nil {
		return nil, err
	}
	return func() error { return os.Rename(data+"_tmp", data) }, nil
}

// Write replaces the content of the file, and removes the one before it.
func (v *Volume) Write(text []byte) error {
	before, _ := os.Readlink(filepath.Join(v.dir, "..data"))
	swap, err := v.Prepare(text)
	if err == nil {
		err = swap()
	}
	if err == nil && before != "" {
		err = os.RemoveAll(filepath.Join(v.dir, before))
	}
	return err
}

// Close removes the volume.
func (v *Volume) Close() error { return os.RemoveAll(v.dir) }
