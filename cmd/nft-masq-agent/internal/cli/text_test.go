package cli

import (
	"bytes"
	"io"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"nft-masq-agent/config"
	"nft-masq-agent/nft/nfttest"
)

func TestJSONIsOneLine(t *testing.T) {
	var got bytes.Buffer
	h := NewHead("check")
	h.Add(config.Note, "n", "<b> & \x1b\x7f\u0085é\u202e\U000e0001")
	nfttest.NoError(t, JSON(&got, h))
	const want = `{"version":1,"command":"check","errors":[],"warnings":[],"notes":[` +
		`{"id":"n","severity":"note","message":"<b> & \u001b\u007f\u0085é\u202e\udb40\udc01"}]}` + "\n"
	nfttest.Same(t, "(-want +got)", want, got.String())
}

func TestFailedOutputIsAnError(t *testing.T) {
	w, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	nfttest.NoError(t, err)
	defer w.Close()
	if err := JSON(w, NewHead("check")); err == nil || !strings.HasPrefix(err.Error(), "output: ") {
		t.Errorf("a full disk: %v, want an error that begins with output:", err)
	}
	if err := JSON(io.Discard, []any{math.NaN()}); err == nil {
		t.Error("NaN is no error")
	}
}

func TestTextHasProblemsAsLines(t *testing.T) {
	msg := strings.Repeat("word ", 20) + "end"
	problem := config.Problem{Level: config.Warning, ID: "w", Msg: msg, Details: "do\nthis"}
	for terminal, want := range map[bool]string{
		false: problem.Msg + "\n  do\n  this\n\nNotes:\n  note\n",
		true:  Fit(problem.Msg) + "  do\n  this\n\nNotes:\n  note\n",
	} {
		var got bytes.Buffer
		nfttest.NoError(t, Print(&got, terminal, func(t Text) {
			t.Problems(config.Problems{problem})
			t.List("Warnings:", nil)
			t.List("Notes:", config.Problems{{Level: config.Note, ID: "n", Msg: "note"}})
		}))
		nfttest.Same(t, "(-want +got)", want, got.String())
	}
}

func TestLinesAreWrappedAtEightyColumns(t *testing.T) {
	words := func(n, length int) string {
		return strings.TrimSuffix(strings.Repeat(strings.Repeat("x", length)+" ", n), " ")
	}
	for text, want := range map[string]string{
		"":                            "",
		"a  b\nc":                     "a  b\nc\n",
		words(16, 4) + "x":            words(16, 4) + "x\n",
		words(1, 100):                 words(1, 100) + "\n",
		words(27, 2):                  words(27, 2) + "\n",
		words(28, 2):                  words(27, 2) + "\n" + words(1, 2) + "\n",
		"  " + words(27, 2):           "  " + words(26, 2) + "\n  " + words(1, 2) + "\n",
		words(60, 2):                  words(27, 2) + "\n" + words(27, 2) + "\n" + words(6, 2) + "\n",
		" " + words(4, 25) + "\nnext": " " + words(3, 25) + "\n " + words(1, 25) + "\nnext\n",
		"a " + words(2, 79):           "a\n" + words(1, 79) + "\n" + words(1, 79) + "\n",
	} {
		if diff := cmp.Diff(want, Fit(text)); diff != "" {
			t.Errorf("%q (-want +got)\n%s", text, diff)
		}
	}
}

func TestProblemsAreInTheListOfTheirLevel(t *testing.T) {
	h := NewHead("check")
	h.Add(config.Warning, "w", "warning %d", 1)
	h.Add(config.Note, "n", "note")
	e := config.Problem{ID: "e", Level: config.Mistake, Msg: "error two", Details: "because\ndo this"}
	h.Begin().Take(config.Problems{e})
	want := Head{
		Version: 1, Command: "check", Errors: config.Problems{e},
		Warnings: config.Problems{{ID: "w", Level: config.Warning, Msg: "warning 1"}},
		Notes:    config.Problems{{ID: "n", Level: config.Note, Msg: "note"}},
	}
	nfttest.Same(t, "(-want +got)", want, h, cmpopts.IgnoreUnexported(config.Problem{}))
}
