package nfttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// DeadMount mounts a file system that never responds, like one on a dead NFS
// server, and unmounts it when the test ends.
func DeadMount(tb testing.TB) string {
	tb.Helper()
	return mountFUSE(tb, func(int) {})
}

// A FUSERequest is the number of a request to a FUSE server, as in linux/fuse.h.
type FUSERequest uint32

// The requests that reading a file causes.
const (
	FUSELookup  FUSERequest = 1
	FUSEGetattr FUSERequest = 3
	FUSEOpen    FUSERequest = 14
	FUSERead    FUSERequest = 15
)

// HungMount mounts a file system whose directory has a file, an empty list, under
// every name. Its server accepts requests of one kind and never replies to them.
// The thread that waits for the reply cannot be killed, nor can its process exit.
// HungMount unmounts the file system when the test ends.
func HungMount(tb testing.TB, at FUSERequest) string {
	tb.Helper()
	return mountFUSE(tb, func(fd int) {
		request := make([]byte, 1<<17+1<<12) // the kernel asks for room for a write
		for {
			_, err := unix.Read(fd, request)
			if err != nil && !errors.Is(err, unix.EINTR) {
				return // unmounted
			}
			header := struct {
				Len, Request uint32
				Unique, Node uint64
			}{}
			_, _ = binary.Decode(request, binary.NativeEndian, &header)
			if r := FUSERequest(header.Request); err == nil && r != at {
				_, _ = unix.Write(fd, fuseReply(r, header.Unique, header.Node))
			}
		}
	})
}

func mountFUSE(tb testing.TB, serve func(fd int)) string {
	tb.Helper()
	Require(tb)
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		tb.Fatal(err)
	}
	dir := tb.TempDir()
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)
	if err := unix.Mount("dead", dir, "fuse", 0, options); err != nil {
		tb.Fatal(err)
	}
	var server sync.WaitGroup
	server.Go(func() { serve(fd) })
	tb.Cleanup(func() {
		// By force, so that blocked calls return.
		report(tb, unix.Unmount(dir, unix.MNT_DETACH|unix.MNT_FORCE))
		server.Wait()
		report(tb, unix.Close(fd))
	})
	return dir
}

// fuseReply returns the reply to a request about a node.
func fuseReply(r FUSERequest, unique, node uint64) []byte {
	const (
		start = 26 // FUSE_INIT

		root, file = 1, 2 // nodes
		content    = "nonMasqueradeCIDRs: []\n"
	)
	type attributes struct {
		Node, Size, Blocks, Atime, Mtime, Ctime uint64
		NS                                      [3]uint32
		Mode, Links, UID, GID, Dev, Block, _    uint32
	}
	about := map[uint64]attributes{
		root: {Node: root, Mode: unix.S_IFDIR | 0o755, Links: 2},
		file: {Node: file, Mode: unix.S_IFREG | 0o644, Links: 1, Size: uint64(len(content))},
	}
	errno := int32(0)
	var reply any
	switch r {
	case start:
		reply = struct {
			Major, Minor, ReadAhead, Flags uint32
			Background, Congestion         uint16
			MaxWrite                       uint32
			_                              [10]uint32
		}{Major: 7, Minor: 31, ReadAhead: 1 << 16, MaxWrite: 1 << 16}
	case FUSELookup:
		reply = struct {
			Node, Generation, Valid, AttributesValid uint64
			NS                                       [2]uint32
			About                                    attributes
		}{Node: file, About: about[file]}
	case FUSEGetattr:
		reply = struct {
			Valid, NS uint64
			About     attributes
		}{About: about[node]}
	case FUSEOpen:
		reply = [2]uint64{}
	case FUSERead:
		reply = []byte(content)
	default:
		reply, errno = []byte{}, -int32(unix.ENOSYS)
	}
	size := binary.Size(reply)
	text, _ := binary.Append(nil, binary.NativeEndian, struct {
		Len    uint32
		Errno  int32
		Unique uint64
	}{uint32(16 + size), errno, unique})
	text, _ = binary.Append(text, binary.NativeEndian, reply)
	return text
}
