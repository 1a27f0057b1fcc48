package health

import (
	"golang.org/x/sys/unix"

	"nft-masq-agent/config"
)

// isMounted reports whether a file is the root of a mount. One that cannot be read is a rejected config.
func isMounted(path string) bool {
	var s unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &s)
	return err == nil && s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && s.Mode&unix.S_IFMT == unix.S_IFREG
}

// files finds a config that does not follow its source. Whoever writes such a file replaces it: the kubelet, kubectl,
// editors.
func (f *Facts) files() config.Problems {
	if !f.Single {
		return nil
	}
	return config.Problems{problem(config.Error, SingleFile, "mount the directory instead of the file, and restart the "+
		"pod", "the config does not follow its source when that is replaced: it is mounted as a single file (subPath)")}
}
