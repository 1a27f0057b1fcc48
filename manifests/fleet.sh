#!/bin/sh
# Asks the agent of each node for its status: fleet.sh [NAMESPACE [SELECTOR]]
#
# Prints a row per node: hash of the policy, since when it is enforced, whether the
# kernel is in sync with it, and what is wrong. Exit code 1 if anything is wrong, if
# nodes have different policies, or if nodes have no pod. Needs kubectl and awk.
set -eu
KUBECTL="${KUBECTL:-kubectl}"
FLEET_NAMESPACE="${1:-kube-system}"
selector="${2:-app.kubernetes.io/name=nft-masq-agent}"
export KUBECTL FLEET_NAMESPACE

# row NODE POD: words are separated by tabs.
row='
errors="$(mktemp)"
trap '\''rm -f "$errors"'\'' EXIT
answer="$($KUBECTL -n "$FLEET_NAMESPACE" exec "$2" -- /nft-masq-agent status -o json 2>"$errors" </dev/null)"
printf "%s\n" "$answer" | awk -v node="$1" -v failure="$(tail -n 1 "$errors")" '\''
	# Tells apart the tokens of JSON, and keeps each value by its path, such as errors.0.message.
	{ text = text $0 "\n" }
	END {
		depth = 0
		while (match(text, /"([^"\\]|\\.)*"|[][{},]|[-+.0-9A-Za-z]+/)) {
			token = substr(text, RSTART, RLENGTH)
			text = substr(text, RSTART + RLENGTH)
			if (token == "{" || token == "[") {
				list[++depth] = token == "["
				key[depth] = list[depth] ? 0 : ""
			} else if (token == "}" || token == "]") {
				depth--
				if (depth > 0 && !list[depth]) key[depth] = ""
			} else if (token == ",") {
				if (list[depth]) key[depth]++
				else key[depth] = ""
			} else if (depth > 0 && !list[depth] && key[depth] == "") {
				key[depth] = substr(token, 2, length(token) - 2)
			} else {
				path = ""
				for (i = 1; i <= depth; i++) path = path (i > 1 ? "." : "") key[i]
				gsub(/^"|"$/, "", token)
				gsub(/\\"/, "\"", token)
				gsub(/\\[a-z]/, " ", token)
				value[path] = token
			}
		}
		sync = value["kernel.inSync"] == "true" ? "yes" : "no"
		wrong = value["errors.0.message"]
		for (n = 1; ("errors." n ".message") in value; n++) more = " (and " n " more)"
		if (!("version" in value)) { sync = "?"; wrong = failure == "" ? "no answer" : failure }
		else if (sync == "no" && wrong == "") wrong = "the kernel is not in sync: see status"
		since = value["agent.policy.since"]
		sub(/\.[0-9]+/, "", since)
		hash = value["agent.policy.hash"]
		if (hash == "") hash = value["kernel.hash"]
		printf "%s\t%s\t%s\t%s\t%s\n", node, none(hash), none(since), sync, none(wrong more)
	}
	function none(s) { return s == "" ? "-" : s }
'\''
'

pods="$($KUBECTL -n "$FLEET_NAMESPACE" get pods -l "$selector" --no-headers \
	-o custom-columns=NODE:.spec.nodeName,POD:.metadata.name)"
wanted="$($KUBECTL -n "$FLEET_NAMESPACE" get daemonsets -l "$selector" --no-headers \
	-o custom-columns=N:.status.desiredNumberScheduled)"
test -n "$pods" || { echo "no pods with $selector in the namespace $FLEET_NAMESPACE"; exit 1; }
printf '%s\n' "$pods" | xargs -n 2 -P 16 sh -c "$row" row | sort | awk -F '\t' -v wanted="$wanted" '
	function line(a, b, c, d, e) { printf "%-*s  %-8s  %-20s  %-4s  %s\n", width, a, b, c, d, e }
	BEGIN { width = 4 }
	{ rows[NR] = $0; if (length($1) > width) width = length($1); nodes[$2]++; if (nodes[$2] == 1) hashes++ }
	$5 != "-" { bad++ }
	END {
		n = split(wanted, w, "[ \n]+")
		for (i = 1; i <= n; i++) desired += w[i]
		if (bad) print "something is wrong on " bad " of " NR " nodes"
		if (desired > NR) print "no pod on " desired - NR " of " desired " nodes"
		if (hashes > 1) for (h in nodes) print (h == "-" ? "no policy" : "policy " h) ": " nodes[h] " of " NR " nodes"
		if (!bad && hashes == 1 && desired <= NR) print "all " NR " nodes are in sync with " $2
		line("NODE", "HASH", "SINCE", "SYNC", "WRONG")
		for (i = 1; i <= NR; i++) { split(rows[i], f, "\t"); line(f[1], f[2], f[3], f[4], f[5]) }
		exit bad || hashes != 1 || desired > NR
	}'
