package iprange

import "slices"

// Normal sorts ranges and merges those that overlap.
func Normal(ranges []Range) []Range {
	slices.SortFunc(ranges, func(a, b Range) int { return a.From.Compare(b.From) })
	out := ranges[:0]
	for _, r := range ranges {
		if last := len(out) - 1; last >= 0 && r.From.Compare(out[last].To) <= 0 {
			if r.To.Compare(out[last].To) > 0 {
				out[last].To = r.To
			}
			continue
		}
		out = append(out, r)
	}
	return out
}

// Intersect returns what is in both sets. Sets are sorted ranges that do not overlap; IPv4
// sorts before IPv6, so one set can hold both.
func Intersect(a, b []Range) []Range {
	var out []Range
	for len(a) > 0 && len(b) > 0 {
		r := a[0]
		if r.From.Less(b[0].From) {
			r.From = b[0].From
		}
		if b[0].To.Less(r.To) {
			r.To = b[0].To
		}
		if r.From.Compare(r.To) <= 0 {
			out = append(out, r)
		}
		if a[0].To.Less(b[0].To) {
			a = a[1:]
		} else {
			b = b[1:]
		}
	}
	return out
}

// Subtract returns the part of a that is not in b.
func Subtract(a, b []Range) []Range {
	var out []Range
	for _, r := range a {
		for len(b) > 0 && b[0].To.Less(r.From) {
			b = b[1:]
		}
		covered := false
		for _, cut := range b {
			if r.To.Less(cut.From) {
				break
			}
			if r.From.Less(cut.From) {
				out = append(out, Range{From: r.From, To: cut.From.Prev()})
			}
			if covered = !cut.To.Less(r.To); covered {
				break
			}
			r.From = cut.To.Next()
		}
		if !covered {
			out = append(out, r)
		}
	}
	return out
}
