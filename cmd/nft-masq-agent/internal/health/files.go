package health

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
)

// readFiles reads how the config is mounted, and what is next to it if it is missing.
func (f *Facts) readFiles() {
	var s unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, f.Path, 0, unix.STATX_TYPE, &s)
	if errors.Is(err, fs.ErrNotExist) {
		f.OtherFile = otherFile(filepath.Dir(f.Path))
	}
	if err != nil {
		return // the config is rejected then
	}
	f.Single = s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && s.Mode&unix.S_IFMT == unix.S_IFREG
}

// otherFile returns a file of a directory that is probably meant, such as another key of a ConfigMap.
func otherFile(dir string) string {
	sources, err := config.Read(dir)
	if err != nil {
		return "" // nothing is known of other files
	}
	for _, s := range sources {
		if !s.Ignored {
			return s.Name
		}
	}
	return ""
}

// files finds a config that is missing next to another one, and one that no longer follows
// its source.
func (f *Facts) files() (found config.Problems) {
	if f.OtherFile != "" {
		found = append(found, problem(config.Error, OtherFile, fmt.Sprintf("there is no %s, but %s\n"+
			"name that file (the key of the ConfigMap) %s, or give --config %[2]s", config.Printable(f.Path), f.OtherFile,
			config.Printable(filepath.Base(f.Path))), "the defaults apply: the config file is missing, next to another one"))
	}
	if f.Single {
		// Whoever writes such a file replaces it: the kubelet, kubectl, editors.
		found = append(found, problem(config.Error, SingleFile, "mount the directory instead of the file, and restart the "+
			"pod", "the config does not follow its source when that is replaced: it is mounted as a single file (subPath)"))
	}
	return found
}
