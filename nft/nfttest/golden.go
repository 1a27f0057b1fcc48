package nfttest

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// Golden compares the paragraphs of a file: "#" and a name, a text, and in it or after it lines that begin with ">". body
// returns the text with these lines. With update, they are written anew.
func Golden(t *testing.T, file string, update bool, body func(t *testing.T, name, text string) string) {
	t.Helper()
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for _, paragraph := range strings.Split("\n\n"+strings.TrimSuffix(string(want), "\n"), "\n\n#")[1:] {
		paragraph += "\n"
		name, rest, _ := strings.Cut(paragraph, "\n")
		var text strings.Builder
		for line := range strings.Lines(rest) {
			if line[0] != '>' {
				text.WriteString(line)
			}
		}
		got := ""
		t.Run(strings.TrimSpace(name), func(t *testing.T) {
			got = name + "\n" + body(t, name, text.String())
			if diff := cmp.Diff(paragraph, got); diff != "" && !update {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
		all = append(all, "#"+got)
	}
	if update {
		err = os.WriteFile(file, []byte(strings.Join(all, "\n")), 0o644)
	}
	if err != nil || len(all) == 0 {
		t.Errorf("%s: %d paragraphs, %v", file, len(all), err)
	}
}

// Marked begins each line with ">".
func Marked(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		b.WriteString("> " + strings.TrimSuffix(line, "\n") + "\n")
	}
	return b.String()
}
