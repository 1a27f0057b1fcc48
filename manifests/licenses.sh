#!/usr/bin/env bash
# licenses.sh DIR ARCH…: collects the licences of everything that is linked into
# the binary in DIR, by module: those next to a linked package or in a directory
# above it. Fails if a module has none.
set -euo pipefail
out=$1
shift
rm -rf "$out"
mkdir -p "$out/nft-masq-agent" "$out/go"
cp LICENSE "$out/nft-masq-agent/"
cp "$(go env GOROOT)/LICENSE" "$out/go/"
for arch; do
	CGO_ENABLED=0 GOOS=linux GOARCH=$arch go list -deps \
		-f '{{with .Module}}{{if not .Main}}{{.Path}} {{.Dir}} {{$.Dir}}{{end}}{{end}}' ./cmd/nft-masq-agent
done | sort -u | while read -r module root dir; do
	while :; do
		find "$dir" -maxdepth 1 -type f -regextype posix-extended -iregex '.*/(licen[cs]e|copying|notice|patents)[^/]*' |
			while read -r file; do
				to="$out/$module/${file#"$root"/}"
				mkdir -p "${to%/*}"
				cp --no-preserve=mode "$file" "$to"
			done
		if [ "$dir" = "$root" ]; then break; fi
		dir=${dir%/*}
	done
	if [ -z "$(find "$out/$module" -type f 2>/dev/null)" ]; then
		echo "no licence found for $module" >&2
		exit 1
	fi
done
