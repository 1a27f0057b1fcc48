package nfttest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// DeadMount makes processes that are started inside a namespace from now on see a
// file system that never responds, like one on a dead NFS server. No other process
// sees it. When the test ends, it responds with errors.
func DeadMount(tb testing.TB, n *NS) string {
	tb.Helper()
	return mountFUSE(tb, n, func(*os.File) {})
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

// HungMount is like DeadMount, but the directory has a file, an empty list, under
// every name. Its server accepts requests of one kind and never replies to them.
// The thread that waits for the reply cannot be killed, nor can its process exit.
func HungMount(tb testing.TB, n *NS, at FUSERequest) string {
	tb.Helper()
	return mountFUSE(tb, n, func(fuse *os.File) {
		request := make([]byte, 1<<17+1<<12) // the kernel asks for room for a write
		for {
			if _, err := fuse.Read(request); err != nil {
				return // closed, or unmounted
			}
			header := struct {
				Len, Request uint32
				Unique, Node uint64
			}{}
			_, _ = binary.Decode(request, binary.NativeEndian, &header)
			if r := FUSERequest(header.Request); r != at {
				_, _ = fuse.Write(fuseReply(r, header.Unique, header.Node))
			}
		}
	})
}

func mountFUSE(tb testing.TB, n *NS, serve func(fuse *os.File)) string {
	tb.Helper()
	Require(tb)
	var (
		dir     = tb.TempDir()
		mu      sync.Mutex
		mounts  []*os.File
		servers sync.WaitGroup
	)
	n.OnStart(func() error {
		fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", fd)
		if err := unix.Mount("dead", dir, "fuse", 0, options); err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		fuse := os.NewFile(uintptr(fd), "/dev/fuse") // it can be polled once it is mounted
		servers.Go(func() { serve(fuse) })
		mu.Lock()
		defer mu.Unlock()
		mounts = append(mounts, fuse)
		return nil
	})
	tb.Cleanup(func() {
		for _, fuse := range mounts {
			report(tb, fuse.Close()) // blocked calls return
		}
		servers.Wait()
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
