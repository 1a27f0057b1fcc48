package observe

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/loop"
)

func TestReadmeListsTheEventsOfTheLog(t *testing.T) {
	seen := map[string]bool{}
	for _, pattern := range []string{"*.go", "../agent/*.go", "../../*.go"} {
		files, err := filepath.Glob(pattern)
		nfttest.NoError(t, err)
		for _, name := range files {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			text, err := os.ReadFile(name)
			nfttest.NoError(t, err)
			for event := range loop.Documented() {
				seen[event] = seen[event] || strings.Contains(string(text), `"`+event+`"`)
			}
			for _, m := range regexp.MustCompile(`(?:Level, |log\(.\.Agent, |add\(level, |"event", |event = |event, text := )"([a-z_]+)"`).FindAllStringSubmatch(string(text), -1) {
				if _, ok := loop.Documented()[m[1]]; !ok {
					t.Errorf("%s: the README has no event %s", name, m[1])
				}
			}
		}
	}
	for event, ok := range seen {
		if !ok {
			t.Errorf("the README has an event %s, which is never logged", event)
		}
	}
	if len(seen) < 42 {
		t.Errorf("the README has %d events that this test finds, want at least 42", len(seen))
	}
}
