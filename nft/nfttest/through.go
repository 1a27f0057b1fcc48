package nfttest

import (
	"iter"

	"github.com/mdlayher/netlink"
)

// Through makes dial return connections on whose way to the kernel functions see each message. They may change it,
// and with an error it is not sent, or not received. Nil: whatever comes.
func Through(
	dial func() (*netlink.Conn, error), sent, received func(*netlink.Message) error,
) func() (*netlink.Conn, error) {
	anything := func(*netlink.Message) error { return nil }
	if sent == nil {
		sent = anything
	}
	if received == nil {
		received = anything
	}
	return func() (*netlink.Conn, error) {
		nl, err := dial()
		if err != nil {
			return nil, err
		}
		return netlink.NewConn(through{nl, sent, received}, nl.PID()), nil
	}
}

type through struct {
	*netlink.Conn
	sent, received func(*netlink.Message) error
}

func (s through) Send(m netlink.Message) error { return s.SendMessages([]netlink.Message{m}) }

func (s through) SendMessages(all []netlink.Message) error {
	for i := range all {
		if err := s.sent(&all[i]); err != nil {
			return err
		}
	}
	_, err := s.Conn.SendMessages(all)
	return err
}

func (s through) Receive() (all []netlink.Message, err error) {
	for m, err := range s.ReceiveIter() {
		if err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

// ReceiveIter ends as the socket of the kernel does: the connection behind it has taken the
// last message of a dump.
func (s through) ReceiveIter() iter.Seq2[netlink.Message, error] {
	return func(yield func(netlink.Message, error) bool) {
		for m, err := range s.Conn.ReceiveIter() {
			if err == nil {
				err = s.received(&m)
			}
			if !yield(m, err) || err != nil {
				return
			}
		}
		yield(netlink.Message{Header: netlink.Header{Type: netlink.Done, Flags: netlink.Multi}}, nil)
	}
}
