package manifests_test

import (
	"encoding/json"
	"os/exec"
	"regexp"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"nft-masq-agent/nft/nfttest"
	"nft-masq-agent/nft/nfttest/agent"
)

func TestSBOMListsTheModulesOfTheBinary(t *testing.T) {
	nfttest.SkipIfShort(t)
	program := agent.Program(t)
	text, err := exec.CommandContext(t.Context(), "go", "run", "./sbom", "v1.0.0", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	var bom struct {
		Metadata struct {
			Component struct{ PURL string }
		}
		Components []struct {
			Name, Version, PURL string
		}
	}
	if err := json.Unmarshal(text, &bom); err != nil {
		t.Fatal(err)
	}
	if bom.Metadata.Component.PURL != "pkg:golang/nft-masq-agent@v1.0.0" {
		t.Errorf("the SBOM describes %s", bom.Metadata.Component.PURL)
	}
	list, err := exec.CommandContext(t.Context(), "go", "version", "-m", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, m := range regexp.MustCompile(`(?m)^\tdep\t(\S+)\t(\S+)`).FindAllSubmatch(list, -1) {
		want = append(want, "pkg:golang/"+string(m[1])+"@"+string(m[2]))
	}
	for _, c := range bom.Components[1:] { // after std
		got = append(got, c.PURL)
	}
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" || len(want) == 0 || bom.Components[0].Name != "std" {
		t.Errorf("std is %v, -go version +sbom:\n%s", bom.Components[0], diff)
	}
}
