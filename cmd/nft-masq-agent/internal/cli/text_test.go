package cli

import (
	"bytes"
	"encoding/json"
	"io"
	"math"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"nft-masq-agent/config"
)

type pair struct {
	Number int    `json:"number"`
	Text   string `json:"text"`
}

func TestJSONIsIndentedAsByTheLibrary(t *testing.T) {
	answer := struct {
		Head
		Place *int        `json:"place"`
		None  []int       `json:"none,omitempty"`
		Of    *Head       `json:"of,omitempty"`
		Pairs []pair      `json:"pairs,omitempty"`
		More  []*[]string `json:"more"`
		Empty []pair      `json:"empty"`
		Plain pair        `json:"plain"`
		Zero  int         `json:"zero,omitempty"`
	}{
		Head: NewHead("check"), None: []int{}, Of: &Head{Command: "of"}, Pairs: []pair{{1, "a"}, {2, "<b>"}},
		More: []*[]string{{"a", "b"}, {}, nil}, Empty: []pair{},
	}
	for _, v := range []any{
		answer, &answer, []Head{{}, NewHead("diff")}, 1, []int{}, map[string]any{
			"empty": []any{[]int{}, map[string]int{}, ""},
			"lists": [][]int{{1, 2}, {3}},
			"texts": map[string]string{`{"a": [1, 2]}`: "\\\" , : {\n<é>", "control": "\x00\u2028", "end": `\`, "{": `\"[`},
			"value": answer,
		},
	} {
		var got, want bytes.Buffer
		enc := json.NewEncoder(&want)
		enc.SetEscapeHTML(false)
		enc.SetIndent("", "  ")
		if err := enc.Encode(v); err != nil {
			t.Fatal(err)
		}
		if err := JSON(&got, v); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want.String(), got.String()); diff != "" {
			t.Errorf("%T (-want +got)\n%s", v, diff)
		}
	}
}

func TestJSONHasNoCharacterThatATerminalDoesNotShow(t *testing.T) {
	const text = "\x7f\u0085é\u202e\U000e0001 <&>"
	var got bytes.Buffer
	if err := JSON(&got, []string{text}); err != nil {
		t.Fatal(err)
	}
	const want = "[\n  \"\\u007f\\u0085é\\u202e\\udb40\\udc01 <&>\"\n]\n"
	if got.String() != want {
		t.Errorf("%q, want %q", &got, want)
	}
}

func TestFailedOutputIsAnError(t *testing.T) {
	w, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := JSON(w, NewHead("check")); err == nil || !strings.HasPrefix(err.Error(), "output: ") {
		t.Errorf("a full disk: %v, want an error that begins with output:", err)
	}
	if err := JSON(io.Discard, []any{math.NaN()}); err == nil {
		t.Error("NaN is no error")
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
	if got := Line(" a\n\tb ", "  "); got != "  a b\n" {
		t.Errorf("the line is %q, want it indented, with one space for each gap", got)
	}
}

func TestColorsAreOfTheFirstLineAndOfStates(t *testing.T) {
	const text = "all is wrong\nrules           ok    in sync\nconnections     wrong 2\nelse  ok  \n"
	const want = "\x1b[1mall is wrong\x1b[0m\nrules           \x1b[32mok\x1b[0m    in sync\n" +
		"connections     \x1b[31mwrong\x1b[0m 2\nelse  ok  \n"
	if diff := cmp.Diff(want, Color(text)); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestProblemsAreInTheListOfTheirLevel(t *testing.T) {
	h := NewHead("check")
	h.Add(config.Warning, "w", "warning %d", 1)
	h.Add(config.Note, "n", "note")
	c := h.Clone()
	c.Begin().Explain(config.Error, "e", "because\ndo this", "error %s", "two")
	e := config.Problem{ID: "e", Level: config.Error, Msg: "error two", Details: "because\ndo this"}
	w := config.Problem{ID: "w", Level: config.Warning, Msg: "warning 1"}
	n := config.Problem{ID: "n", Level: config.Note, Msg: "note"}
	want := Head{
		Version: 1, Command: "check",
		Errors: config.Problems{e}, Warnings: config.Problems{w}, Notes: config.Problems{n},
	}
	unexported := cmpopts.IgnoreUnexported(config.Problem{})
	if diff := cmp.Diff(want, c, unexported); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	if diff := cmp.Diff(config.Problems{e, w, n}, c.Problems(), unexported); diff != "" {
		t.Errorf("problems (-want +got)\n%s", diff)
	}
	if len(h.Problems()) != 2 {
		t.Errorf("the copy changed the original: %v", h)
	}
}
