package running

import (
	"context"
	"io"
	"net"
)

// Abstract unix sockets, of which each network namespace has one: of the agent that
// came first, and of one that came later.
const (
	lockName  = "@nft-masq-agent"
	laterName = "@nft-masq-agent-later"
)

// Lock makes this process the agent of its network namespace, until it is closed. It is
// an error if another process is that.
func Lock() (io.Closer, error) { return listen(lockName) }

// Announce tells the agent that has the lock, until it is closed, that this process is
// another agent. It is an error if a third one does so.
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

// Holder returns the process of the agent that has the lock of this network namespace, or
// [Hidden], and whether there is one. A process of another user than root and the caller
// does not count: every user can take the lock.
func Holder() (pid int, found bool) { return listener(lockName) }

// Announced returns the process of an agent that came later than the one that has the
// lock, as Holder does.
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
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	c, holder, err := dial(ctx, name)
	if err != nil {
		return 0, false
	}
	_ = c.Close()
	if holder.Pid == 0 {
		return Hidden, true
	}
	return int(holder.Pid), true
}
