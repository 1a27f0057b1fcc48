package manifests_test

import (
	"encoding/json"
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
	text := run(t, "go run ./manifests/sbom v1.0.0 "+program)
	var bom struct {
		Metadata struct {
			Component struct{ PURL string }
		}
		Components []struct {
			Name, Version, PURL string
		}
	}
	must(t, json.Unmarshal([]byte(text), &bom))
	if bom.Metadata.Component.PURL != "pkg:golang/nft-masq-agent@v1.0.0" {
		t.Errorf("the SBOM describes %s", bom.Metadata.Component.PURL)
	}
	var want, got []string
	list := run(t, "go version -m "+program)
	for _, m := range regexp.MustCompile(`(?m)^\tdep\t(\S+)\t(\S+)`).FindAllStringSubmatch(list, -1) {
		want = append(want, "pkg:golang/"+m[1]+"@"+m[2])
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
