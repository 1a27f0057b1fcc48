package agent

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"nft-masq-agent/nft/nfttest"
)

// prebuilt names the program on a machine without Go.
const prebuilt = "NFT_MASQ_AGENT_TEST_PROGRAM"

// builtIn is the directory of the program; "" if no test has needed it yet.
var builtIn string

var build = sync.OnceValues(func() (program string, err error) {
	if program = Prebuilt(); program != "" {
		return program, nil
	}
	if builtIn, err = os.MkdirTemp("", "nft-masq-agent-test-"); err != nil {
		return "", err
	}
	program = filepath.Join(builtIn, "nft-masq-agent")
	cmd := exec.Command("go", "build", "-buildvcs=false", "-tags=nethttpomithttp2", "-ldflags=-s -w",
		"-o", program, "nft-masq-agent/cmd/nft-masq-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return program, nil
})

// Prebuilt returns the path of the program if it need not be built; "" otherwise.
func Prebuilt() string { return os.Getenv(prebuilt) }

// Program returns the path of the program, which is built as make does, once for
// all tests of a package. Their TestMain calls [Main].
func Program(tb testing.TB) string {
	tb.Helper()
	program, err := build()
	nfttest.NoError(tb, err)
	return program
}

// Main is nfttest.Main for tests that use [Program].
func Main(m *testing.M) int {
	defer func() { _ = os.RemoveAll(builtIn) }()
	return nfttest.Main(m)
}
