package script

import (
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
	const text = "# before\n\n== one\n| data\n|\"\\r\\n\"\n> %c\n~ a part\n# comment\n\nverb of it\n! not\n> %c\n\n== two\n"
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
