package agent

import (
	"errors"
	"testing"

	"nft-masq-agent/config"
	"nft-masq-agent/nft"
	"nft-masq-agent/nft/layout"
	"nft-masq-agent/nft/nfttest/loop"
)

func rulesetOf(cidrs string) *nft.Ruleset {
	return nft.Build(config.Defaults{}, testSettings().NFT, loop.File(cidrs)...).Ruleset
}

func TestPolicyIsDecidedInThisOrder(t *testing.T) {
	left := &layout.Installed{Hash: "12345678"}
	bad := errors.New("bad")
	compiled := func(err error, cidr string) content {
		return content{files: loop.File(cidr), err: err, want: rulesetOf(cidr)}
	}
	lenient, other, good := compiled(bad, "10.2.0.0/16"), compiled(bad, "10.3.0.0/16"), compiled(nil, "10.4.0.0/16")
	rejected, defaults := content{err: bad}, content{want: rulesetOf("10.0.0.0/8")}
	of := func(from Source, c content) policy { return policy{from: from, want: c.want, content: c} }
	accepted := func(from Source, c content) policy {
		p := of(from, c)
		p.accepted = true
		return p
	}
	kept, foreign := policy{from: FromPrevious, left: left}, policy{from: FromForeign}
	everything, older, empty := situation{left, true, defaults}, situation{nil, true, defaults},
		situation{nil, false, defaults}
	for _, tt := range []struct {
		name string
		now  policy
		c    content
		n    situation
		want policy
	}{
		{"what a previous run left comes first", policy{}, lenient, everything, kept},
		{"then what the older agents make of the file", policy{}, lenient, older, of(FromLenient, lenient)},
		{"then the rules of an older agent", policy{}, rejected, older, foreign},
		{"then the defaults", policy{}, rejected, empty, of(FromDefaults, defaults)},
		{"rules of a previous run stay as long as they are there", kept, lenient, everything, kept},
		{"once they are gone, it is decided again", kept, lenient, older, of(FromLenient, lenient)},
		{
			"our own rules are not those of a previous run", of(FromLenient, lenient), other, everything,
			of(FromLenient, other),
		},
		{
			"the older agents keep what they have if they reject a file", of(FromLenient, lenient), rejected, older,
			of(FromLenient, lenient),
		},
		{"a removed agent does not stay active with another file", foreign, rejected, empty, of(FromDefaults, defaults)},
		{
			"the defaults stay next to an older agent that comes later", of(FromDefaults, defaults), rejected, older,
			of(FromDefaults, defaults),
		},
		{
			"they give way to what the older agents make of a file", of(FromDefaults, defaults), lenient, empty,
			of(FromLenient, lenient),
		},
		{"a good file always counts", foreign, good, everything, accepted(FromFile, good)},
		{"its absence too", accepted(FromFile, good), defaults, empty, accepted(FromDefaults, defaults)},
		{"the last good config stays", accepted(FromFile, good), lenient, everything, accepted(FromPrevious, good)},
		{"again and again", accepted(FromPrevious, good), lenient, everything, accepted(FromPrevious, good)},
		{
			"so do the defaults of a missing file", accepted(FromDefaults, defaults), lenient, everything,
			accepted(FromDefaults, defaults),
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := decide(tt.now, tt.c, tt.n)
			if got.from != tt.want.from || got.want != tt.want.want || got.content.want != tt.want.want ||
				got.accepted != tt.want.accepted || got.left != tt.want.left {
				t.Errorf("%+v, want %+v", got, tt.want)
			}
		})
	}
}
