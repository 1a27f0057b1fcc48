#!/usr/bin/env bash
# control-plane.sh DIR: builds kube-apiserver, kube-controller-manager and kubectl
# into DIR, of the version of the API that go.mod has for the tests of the
# install section. It takes some minutes of processor.
set -euo pipefail
version=v1.35.4
mkdir -p "$1/build"
cd "$1/build"
dir=$(GOFLAGS=-mod=mod go mod download -json "k8s.io/kubernetes@$version" | sed -n 's/^\t"Dir": "\(.*\)",$/\1/p')
sed -e 's/^module .*/module control-plane/' -e "s#=> ./staging/src/\(.*\)#=> \1 v0${version#v1}#" "$dir/go.mod" >go.mod
echo "require k8s.io/kubernetes $version" >>go.mod
cp --no-preserve=mode "$dir/go.sum" go.sum
printf '//go:build tools\n\npackage tools\n\nimport _ "k8s.io/kubernetes/cmd/kubectl"\n' >tools.go
# Clients ask for the version.
GOFLAGS=-mod=mod go build -ldflags "-X k8s.io/component-base/version.gitVersion=$version" -o .. k8s.io/kubernetes/cmd/{kube-apiserver,kube-controller-manager,kubectl}
