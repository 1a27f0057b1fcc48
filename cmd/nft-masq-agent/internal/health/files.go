package health

import "golang.org/x/sys/unix"

// isMounted reports whether a file is the root of a mount. One that cannot be read is a rejected config.
func isMounted(path string) bool {
	var s unix.Statx_t
	err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_TYPE, &s)
	return err == nil && s.Attributes&unix.STATX_ATTR_MOUNT_ROOT != 0 && s.Mode&unix.S_IFMT == unix.S_IFREG
}
