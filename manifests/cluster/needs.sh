#!/usr/bin/env bash
# needs.sh GROUP TEST: says what make test-cluster needs and will take, and fails if it
# is not there or if there is no such group.
set -euo pipefail
groups='flannel bridge ptp portmap kindnet kube-proxy uplinks upgrade'
cache=${XDG_CACHE_HOME:-$HOME/.cache}/nft-masq-agent
case $1 in
'') echo "test-cluster: ${2:-all tests}, 60 minutes with two processors; CLUSTER_ONLY=GROUP runs one of: $groups" ;;
*) [[ " $groups " == *" $1 "* ]] || { echo "no group $1; groups: $groups" >&2 && exit 1; }
	echo "test-cluster: the group $1 alone, 5 minutes with two processors" ;;
esac
compgen -G "$cache/cluster-*/bin/kube-apiserver" >/dev/null || [ "$1" = upgrade ] ||
	echo "It first builds Kubernetes into $cache: 15 minutes, 5 GB with Go's caches, modules from the module proxy."
echo 'It needs root, Go, nft, iptables, git, and packages of Debian (extracted; buildah is installed for all tests).'
[ "$(id -u)" = 0 ] || { echo 'not root' >&2 && exit 1; }
memory=$(awk '/^MemAvailable/ { print int($2 / 1024) }' /proc/meminfo)
[ "$memory" -ge 3000 ] || { echo "$memory MiB of memory are free; it needs 3000" >&2 && exit 1; }
for dir in "${TMPDIR:-/tmp}" "$(mkdir -p "$cache" && echo "$cache")"; do
	free=$(df --output=avail -m "$dir" | tail -1)
	[ "$free" -ge 8000 ] || { echo "$free MiB are free in $dir; it needs 8000" >&2 && exit 1; }
done
