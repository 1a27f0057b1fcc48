package running

import (
	"io"
	"net"
	"time"
)

// Names of abstract unix sockets, of which each network namespace has its own: the lock of the agent that came first,
// and the place of a second one.
const (
	lockName  = "@nft-masq-agent"
	laterName = "@nft-masq-agent-later"
)

// Lock makes this process the agent of its network namespace, until the lock is closed. It fails while another process
// has the lock.
func Lock() (io.Closer, error) { return listen(lockName) }

// Announce takes the place of the second agent in the network namespace until it is closed, which the first one
// notices. It fails while a third process has that place.
func Announce() (io.Closer, error) { return listen(laterName) }

func listen(name string) (io.Closer, error) {
	l, err := net.Listen("unix", name)
	if err != nil {
		return nil, err
	}
	go func() {
		for { // so that the queue is never full
			c, err := l.Accept()
			if err != nil {
				return
			}
			_ = c.Close()
		}
	}()
	return l, nil
}

// Hidden stands for the ID of a process that is in a PID namespace which this process does
// not see.
const Hidden = -1

// Holder returns the process that has the lock of this network namespace, or [Hidden], and whether there is one. Every
// user can take the lock, so a process counts only if it is one of root or of the caller's user.
func Holder() (pid int, found bool) { return listener(lockName) }

// Announced returns the process in the place of the second agent, as Holder does.
func Announced() (pid int, found bool) { return listener(laterName) }

// Agent returns the process of an agent in this network namespace, also of one that cannot
// have the lock because a process of another user has it.
func Agent() (pid int, found bool) {
	pid, found = Holder()
	if found {
		return pid, true
	}
	return Announced()
}

func listener(name string) (pid int, found bool) {
	c, pid, err := dial("unix", name, time.Now().Add(probeTimeout))
	if err != nil {
		return 0, false
	}
	_ = c.Close()
	if pid == 0 {
		return Hidden, true
	}
	return pid, true
}
