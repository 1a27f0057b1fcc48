#!/usr/bin/env bash
# build.sh PROGRAM...: builds programs of Kubernetes and its tests, CoreDNS, flannel, the
# CNI plugins and the pause container, and extracts Debian's container runtime, into the
# user's cache, and prints the directory with all of them. What is already there stays.
# Kubernetes takes about 15 minutes of processor when Go has nothing cached.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
version=v1.35.4 # of the API that go.mod has for the tests
coredns=v1.13.1
flannel=v0.28.10
plugins=v1.9.1
cache=${XDG_CACHE_HOME:-$HOME/.cache}/nft-masq-agent/cluster-$version
mkdir -p "$cache/bin" "$cache/build" "$cache/deb"
exec 9>"$cache/lock" && flock 9
export CGO_ENABLED=0
# Clients ask for the version.
flags=(-mod=mod -trimpath -ldflags "-s -w -X k8s.io/component-base/version.gitVersion=$version")

# A module that requires Kubernetes, whose staging directories are published.
module() {
	local dir
	dir=$(GOFLAGS=-mod=mod go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
	sed -e 's/^module .*/module cluster/' -e "s#=> ./staging/src/\(.*\)#=> \1 v0${version#v1}#" "$dir/go.mod" >go.mod
	echo "require k8s.io/kubernetes $version" >>go.mod
	cp --no-preserve=mode "$dir/go.sum" go.sum
	printf '//go:build tools\n\npackage tools\n\nimport _ "k8s.io/kubernetes/cmd/kubectl"\n' >tools.go
}

# flanneld without two backends: a module that tencentvpc needs cannot be downloaded, udp needs cgo.
flanneld() {
	local dir
	dir=$(GOFLAGS=-mod=mod go mod download -json "github.com/flannel-io/flannel@$flannel" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
	rm -rf "$cache/flannel" && cp -r --no-preserve=mode "$dir" "$cache/flannel" && cd "$cache/flannel"
	rm -r pkg/backend/tencentvpc pkg/backend/udp
	sed -i '/backend\/\(tencentvpc\|udp\)"/d' main.go
	go build -mod=mod -trimpath -ldflags '-s -w' -o "$cache/bin/flanneld" .
}

program() {
	case $1 in
	pause) (cd "$here/pause" && go build -trimpath -ldflags '-s -w' -o "$cache/bin/pause" .) ;;
	coredns) GOBIN="$cache/bin" go install -trimpath -ldflags '-s -w' "github.com/coredns/coredns@$coredns" ;;
	e2e.test) go test -c "${flags[@]}" -o "$cache/bin/e2e.test" k8s.io/kubernetes/test/e2e ;;
	agnhost | regression-issue-74839) go build "${flags[@]}" -o "$cache/bin/$1" "k8s.io/kubernetes/test/images/$1" ;;
	flanneld) (flanneld) ;;
	cni) # moved when all are there
		for plugin in main/bridge main/ptp main/macvlan ipam/host-local meta/portmap; do
			GOBIN="$cache/cni.new" go install -trimpath -ldflags '-s -w' \
				"github.com/containernetworking/plugins/plugins/$plugin@$plugins"
		done
		mv "$cache/cni.new" "$cache/cni" ;;
	debian) # nothing is installed and nothing started
		(cd "$cache/deb" && apt-get -o APT::Sandbox::User=root download -qq etcd-server containerd runc containernetworking-plugins netcat-openbsd)
		for package in "$cache"/deb/*.deb; do dpkg -x "$package" "$cache/debian"; done ;;
	*) go build "${flags[@]}" -o "$cache/bin/$1" "k8s.io/kubernetes/cmd/$1" ;;
	esac
}

cd "$cache/build"
for name; do
	case $name in debian | cni | flanneld | pause | coredns) ;; *) [ -e tools.go ] || module >&2 ;; esac
	[ -e "$cache/bin/$name" ] || [ -e "$cache/$name" ] || program "$name" >&2
done
echo "$cache"
