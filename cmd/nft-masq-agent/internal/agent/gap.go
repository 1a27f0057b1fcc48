package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"time"

	"nft-masq-agent/config"
)

// longestGap is how long files of the config may be missing before that counts. Editors,
// cp and Ansible remove or truncate a file, and write it 20 to 500 ms later.
const longestGap = 3 * time.Second

// BridgeGaps passes on contents of the config until ctx is done. One that has fewer files
// than the content before is a gap: it is passed on only after longestGap, and not at all
// if the files are back until then. An empty file is missing, as is anything that is
// no file. A slow receiver gets the last content. The first content is never a gap,
// because a start has no earlier content to protect: without a file the defaults apply at once.
func BridgeGaps(ctx context.Context, contents <-chan Files) <-chan Files {
	bridged := make(chan Files)
	go func() {
		b := bridge{}
		for {
			var out chan Files
			if b.ready {
				out = bridged
			}
			select {
			case <-ctx.Done():
				return
			case f := <-contents:
				b.take(f)
			case <-b.end:
				b.pass(b.gap)
			case out <- b.last:
				b.ready = false
			}
		}
	}()
	return bridged
}

// A bridge is what BridgeGaps knows.
type bridge struct {
	last  Files // the content that was passed on, or is to be
	ready bool  // it is to be passed on
	files int   // of the last content that could be read

	gap Files
	end <-chan time.Time // when the gap counts; nil without a gap
}

func (b *bridge) take(f Files) {
	switch {
	case f.readable() && config.Count(f.Sources) < b.files:
		if b.end == nil {
			b.end = time.After(longestGap)
		}
		b.gap = f
	case b.end != nil && reflect.DeepEqual(f, b.last):
		b.end = nil
	default:
		b.pass(f)
	}
}

func (b *bridge) pass(f Files) {
	b.last, b.ready, b.end = f, true, nil
	if f.readable() {
		b.files = config.Count(f.Sources)
	}
}

// readable reports whether it is known which files there are.
func (f Files) readable() bool { return f.Err == nil || errors.Is(f.Err, config.ErrMissing) }

// missing returns why there is no config at a path; nil if there is one.
func (f Files) missing(path string) error {
	if f.Err != nil {
		return f.Err
	}
	if config.Count(f.Sources) > 0 {
		return nil
	}
	why := "no file in it is read"
	if slices.ContainsFunc(f.Sources, func(s config.Source) bool { return !s.Ignored }) {
		why = "the file is empty"
	}
	return fmt.Errorf("%w at %s: %s", config.ErrMissing, config.Printable(path), why)
}
