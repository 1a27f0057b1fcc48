package script

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAnyBytesAreDataThatIsReadAsItIsWritten(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const alphabet = "ab \t\r\n\n#>~!|\"\\é\xff\x00\u2028"
	for range 2000 {
		var want strings.Builder
		for range random.IntN(12) {
			want.WriteByte(alphabet[random.IntN(len(alphabet))])
		}
		c := &Case{Step: &Step{}}
		for line := range strings.Lines(Data(want.String())) {
			if err := c.add("", strings.TrimSuffix(line, "\n")); err != nil {
				t.Fatalf("%q, written as %s: %v", want.String(), line, err)
			}
		}
		if c.Data != want.String() || len(c.Steps) > 0 {
			t.Errorf("%q, written as\n%sis read as %q", want.String(), Data(want.String()), c.Data)
		}
	}
}

// What Golden writes differs from what it reads in what is expected only.
func TestTextsAreWrittenAsTheyAreRead(t *testing.T) {
	file := filepath.Join(t.TempDir(), "golden.txt")
	const text = "# before\n\n== one\n| data\n|\"\\r\\n\"\n> %c\n~ a part\n# comment\n\nverb of it\n! not\n> %c\n\n== " +
		"two\n"
	before := strings.ReplaceAll(text, "%c", "old")
	if err := os.WriteFile(file, []byte(before), 0o600); err != nil {
		t.Fatal(err)
	}
	Golden(t, file, true, func(_ *testing.T, c *Case) {
		if c.Name == "two" {
			return
		}
		c.Say("new\n")
		c.Last().Say("new\n")
		if verb, operands := c.Last().Words(); verb != "verb" || operands != "of it" || c.Data != "data\n\r\n" {
			t.Errorf("verb %q, operands %q, data %q", verb, operands, c.Data)
		}
		if diff := cmp.Diff([]Want{{'>', "old"}, {'~', "a part"}}, c.Wants); diff != "" {
			t.Errorf("(-want +got):\n%s", diff)
		}
	})
	after, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	want := strings.Replace(strings.ReplaceAll(text, "%c", "new"), "> new\n~ a part\n", "~ a part\n> new\n", 1)
	if diff := cmp.Diff(want, string(after)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// failing notes why a test ends.
type failing struct {
	testing.TB
	why string
}

func (f *failing) Helper()                      {}
func (f *failing) Fatalf(text string, a ...any) { f.why = fmt.Sprintf(text, a...) }

func TestAnUnknownVerbEndsATestWithTheTableOfThose(t *testing.T) {
	for line, place := range map[string]string{
		"enforce x": "", "spared udp 10.9.0.9": "", "hang": "stale.txt:7", "sparedd": "stale.txt:7", "in": "stale.txt:7",
	} {
		f := &failing{TB: t}
		s := &Step{Place: "stale.txt:7", Line: line}
		s.IsDocumented(f)
		table := place == "" || strings.Contains(f.why, "`spared PROTOCOLS ADDRESSES`")
		if !strings.HasPrefix(f.why, place) || (f.why != "") != (place != "") || !table {
			t.Errorf("%q ends the test with %q, want the table of verbs: %t", line, f.why, place != "")
		}
	}
}
