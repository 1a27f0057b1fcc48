package reply

import (
	"bytes"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestJSONIsIndentedAsByTheLibrary(t *testing.T) {
	v := map[string]any{
		"empty": []any{[]int{}, map[string]int{}, ""},
		"lists": [][]int{{1, 2}, {3}},
		"texts": map[string]string{`{"a": [1, 2]}`: "\\\" , : {\n<é>", "control": "\x00\u2028"},
		"value": struct {
			Head
			Place *int `json:"place"`
		}{Head: NewHead("check")},
	}
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
		t.Errorf("(-want +got)\n%s", diff)
	}
}
