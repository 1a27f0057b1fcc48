# Draws rows of results.txt over the number of CIDRs: make plots. An image does not know whether the page is light or
# dark: the colors can be read on both.
set terminal svg size 800,330 dynamic font "sans-serif,13"
set logscale xy
set format x "%.0f"
set xtics 10
set tics nomirror scale 0 textcolor rgb "#6e7781"
set key outside right top Left reverse textcolor rgb "#6e7781" spacing 1.6
set border 0
set grid ytics linetype 1 linewidth 0.5 linecolor rgb "#8c959f"
set tmargin 4

# rows are a number of CIDRs and a median: of the column "what", or if it is compared, of "against".
rows(section, what, against) = "< awk -F ' *[|] *' -v at='**".section."**' -v what='".what."' -v against='".against."' ".\
	"'$3 ~ /^[*][*]/ { here = $3 == at } here && $3 == what && (!against || $5 == against) && !seen[$2]++ ".\
	"{ gsub(\",\", \"\", $2); print $2, against ? $6 : $4 }' cmd/bench/results.txt"

set output "cmd/bench/connection.svg"
set label 1 "One new connection through the node, in µs, over the number of CIDRs" at graph 0,1.12 textcolor rgb "#6e7781"
connection(what) = rows("one new connection through the node", what, "")
plot connection("masqueraded, the iptables chain") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#d9730d" \
		title "masqueraded by an iptables chain", \
	connection("exempt, the iptables chain") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#b08800" \
		title "exempt by an iptables chain", \
	connection("masqueraded") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#2f81f7" title "masqueraded by nft-masq-agent", \
	connection("exempt") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#3fa66b" title "exempt by nft-masq-agent"

set output "cmd/bench/change.svg"
set label 1 "All rules written anew, in ms, over the number of CIDRs"
change(against) = rows("full apply", "from a ruleset", against)
plot change("iptables-nft-restore") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#d9730d" title "iptables-nft-restore", \
	change("nft -f") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#b08800" title "nft -f", \
	change("") with linespoints pt 7 ps 0.5 lw 2 lc rgb "#2f81f7" title "nft-masq-agent"
