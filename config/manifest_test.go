package config

import (
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestStandardInputIsRead(t *testing.T) {
	sources, err := ReadFrom(strings.NewReader("a: b"), "in")
	if err != nil || len(sources) != 1 || sources[0].Name != "in" || string(sources[0].Data) != "a: b" {
		t.Error(sources, err)
	}
	large := io.LimitReader(strings.NewReader(strings.Repeat("#", 2*maxSize)), 2*maxSize)
	if sources, err = ReadFrom(large, "in"); err != nil || len(sources[0].Data) != maxSize+1 {
		t.Error(len(sources), err)
	}
	if _, err := ReadFrom(iotest.ErrReader(io.ErrUnexpectedEOF), "in"); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Error(err)
	}
}
