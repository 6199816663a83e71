#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# 'kvt replay' between two hosts, as far as one machine can be two: two sets of
# network, pid, ipc, uts and mount namespaces with their own /proc, /sys and
# /dev/shm, joined by two veth pairs. Nothing is shared but the kernel, so what
# moves must go over the network, and the devices' own counters say that it did.
# Proved: every block of both directions arrives and is right, by IPv4, IPv6 and
# a host's name; the shortcut and the local engine see that this is not one
# host; UCX_NET_DEVICES chooses the card; and when the holders' host is killed
# in mid-run the other one ends with its books in order.
#
# KVT_TEST_REQUESTS=500 replays the whole sample, not only its beginning.
set -euo pipefail

give_up() {
    echo "skipped: $1"
    exit 77
}

fail() {
    echo "FAILED: $1"
    if [[ -s ${dir:-}/fetchers.log ]]; then
        tail -n 20 "$dir/holders.log" "$dir/fetchers.log"
    fi
    exit 1
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
: "${KVT_TEST_COMMAND:?ctest sets it}"
trace=${KVT_TEST_SOURCE_DIR:?ctest sets it}/tests/data/conversation_500.jsonl

# ------------------------------------------------------------------ two hosts

kinds=(--net --pid --ipc --uts --mount)

# What a machine must allow is looked for first: it may have NIXL and no such
# rights, which is no failure. Then this script starts again with NIXL.
if [[ ${1:-} != inside ]]; then
    for tool in ip nsenter setpriv unshare; do
        command -v "$tool" >/dev/null ||
            give_up "two hosts need the program $tool (iproute2, util-linux)"
    done
    ((EUID == 0)) || give_up "two network namespaces need root"
    why=$(unshare --fork "${kinds[@]}" --mount-proc sh -c '
        mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys &&
        ip link add kvt0 type veth peer name kvt1' 2>&1) ||
        give_up "this machine allows no network namespaces: $why"
    exec bash "$here/../support/with_nixl.sh" 15 \
        bash "${BASH_SOURCE[0]}" inside
fi

dir=$(mktemp -d)
outers=()
inits=()

# A host's outer process takes its first one with it, and that all others.
clean_up() {
    local pid
    for pid in "${outers[@]}"; do
        kill -KILL "$pid" 2>/dev/null || true
    done
    rm -rf "$dir"
}
trap clean_up EXIT

# make_host NAME prints nothing and appends the host's first process to `inits`.
# It says when it stands; its outer process dies with this script.
make_host() {
    local outer answer children
    mkfifo "$dir/$1"
    # shellcheck disable=SC2016
    setpriv --pdeathsig KILL unshare --fork --kill-child "${kinds[@]}" \
        --mount-proc sh -c '
            hostname "$1" && mount -t tmpfs tmpfs /dev/shm &&
            mount -t sysfs sysfs /sys && ip link set lo up &&
            mount --bind "$3" /etc/hosts && echo stands >"$2" ||
            echo "does not stand" >"$2"
            exec sleep infinity' sh "$1" "$dir/$1" "$dir/hosts" \
        2>"$dir/$1.log" &
    outer=$!
    outers+=("$outer")
    disown "$outer" # its death is ordered, and no news
    read -r answer <"$dir/$1"
    [[ $answer == stands ]] ||
        fail "host $1 $answer: $(cat "$dir/$1.log")"
    # It has no newline, which read takes for a failure.
    read -r children <"/proc/$outer/task/$outer/children" || true
    inits+=("${children%% *}")
}

# on PID COMMAND... runs a command on the host of that first process.
on() {
    local pid=$1
    shift
    nsenter --target "$pid" --net --pid --ipc --uts --mount -- "$@"
}

# join DEVICE NETWORK makes a cable between the two.
join() {
    local i
    ip link add "$1" netns "${inits[0]}" type veth \
        peer name "$1" netns "${inits[1]}"
    for i in 0 1; do
        on "${inits[i]}" ip addr add "10.77.$2.$((i + 1))/24" dev "$1"
        on "${inits[i]}" ip addr add "fd77:$2::$((i + 1))/64" dev "$1" nodad \
            2>/dev/null || ipv6=0
        on "${inits[i]}" ip link set "$1" up
    done
}

# wait_for_cables returns when both ends of every cable run. The kernel says so
# up to a second after they were set up, and UCX takes no card that does not.
wait_for_cables() {
    local pid device state
    for pid in "${inits[@]}"; do
        for device in eth0 eth1; do
            state=
            until [[ $state == up ]]; do
                state=$(on "$pid" cat "/sys/class/net/$device/operstate")
            done
        done
    done
}

ipv6=1
printf '127.0.0.1 localhost\n10.77.0.1 holders.test\n' >"$dir/hosts"
make_host holders
make_host fetchers
join eth0 0
join eth1 1
wait_for_cables
holders=${inits[0]}
fetchers=${inits[1]}

# ----------------------------------------------------------------------- runs

requests=${KVT_TEST_REQUESTS:-40}
environment=()

# serve ARGS... starts the listening side and sets `port`.
serve() {
    local line
    rm -f "$dir/said"
    mkfifo "$dir/said"
    on "$holders" env "${environment[@]}" "$KVT_TEST_COMMAND" replay \
        --listen :0 --memory 256MiB "$@" >"$dir/said" 2>"$dir/holders.log" &
    listener=$!
    read -r line <"$dir/said" || fail "the holders' side did not start"
    port=${line##*:}
}

# fetch HOST ARGS... runs the other side; its status is the function's.
fetch() {
    local host=$1
    shift
    on "$fetchers" env "${environment[@]}" "$KVT_TEST_COMMAND" replay \
        --connect "$host:$port" --memory 256MiB --json "$@" "$trace" \
        >"$dir/report" 2>"$dir/fetchers.log"
}

# value NAME prints a number or word of the last report.
value() {
    sed -n "s/^ *\"$1\": \"\?\([^\",]*\)\"\?,\?\$/\1/p" "$dir/report" | head -n 1
}

# received DEVICE prints the bytes that came into the host of the fetchers.
received() {
    awk -v device="$1:" '$1 == device { print $2 }' "/proc/$fetchers/net/dev"
}

is() {
    [[ $(value "$1") == "$2" ]] || fail "$1 is $(value "$1"), not $2"
}

# check_good REQUESTS: every block came, was right, and came by NIXL; `bytes` is
# how many.
check_good() {
    is verification_failures 0
    is blocks_failed 0
    is accounted true
    is local 0
    is nixl "$(value bytes)"
    is requests "$1"
    bytes=$(value bytes)
    ((bytes > 0)) || fail "nothing was moved"
}

# good REQUESTS HOST ARGS...
good() {
    local before after count=$1
    shift
    before=$(received eth0)
    fetch "$@" --requests "$count" || fail "a run ended with $?"
    wait "$listener" || fail "the holders' side ended with $?"
    check_good "$count"
    after=$(received eth0)
    ((after - before >= bytes)) ||
        fail "$bytes bytes were moved, $((after - before)) came in by eth0"
    echo "$1: $bytes bytes by NIXL, $((after - before)) came in by eth0," \
        "$(value gb_per_s) GB/s"
}

# One card first, so that its counter tells everything.
environment=(UCX_NET_DEVICES=eth0)
serve
good "$requests" 10.77.0.1
is same_host_shortcut true
serve --engine nixl
good "$requests" holders.test --engine nixl --pull
is same_host_shortcut false
if ((ipv6)); then
    serve
    good 10 "[fd77:0::1]" --model llama-3.2-1b --tp 8
else
    echo "skipped: a run over IPv6, which this machine has switched off"
fi

# The second card, and nothing but the orders on the first.
environment=(UCX_NET_DEVICES=eth1)
first=$(received eth0)
second=$(received eth1)
serve
fetch 10.77.0.1 --requests "$requests" || fail "the run over eth1 ended with $?"
wait "$listener" || fail "the holders' side ended with $?"
check_good "$requests"
first=$(($(received eth0) - first))
second=$(($(received eth1) - second))
((second >= bytes && first < bytes / 20)) ||
    fail "of $bytes bytes $second came in by eth1 and $first by eth0"
echo "UCX_NET_DEVICES=eth1: $second came in by eth1, $first by eth0"

# ---------------------------------------------------------------------- faults

environment=()
serve --engine local
if fetch 10.77.0.1 --engine local --requests "$requests"; then
    fail "the local engine works between two hosts"
fi
grep -q 'cannot be added: .*the local engine cannot reach' \
    "$dir/fetchers.log" || fail "the local engine does not say why it can't"
wait "$listener" && fail "the holders' side ended well"
sed -n 's/^kvt: //p' "$dir/fetchers.log"

# The holders' host is lost in full flight: the whole sample takes long enough
# for that, and a quarter of it has gone when the first line of progress comes.
serve
mkfifo "$dir/lines"
fetch_lines() {
    on "$fetchers" "$KVT_TEST_COMMAND" replay --connect "10.77.0.1:$port" \
        --memory 256MiB --block-bytes 64KiB --json "$trace" \
        >"$dir/report" 2>"$dir/lines"
}
fetch_lines &
fetcher=$!
: >"$dir/fetchers.log"
while read -r line; do
    echo "$line" >>"$dir/fetchers.log"
    if [[ $line == *requests/s* && ${inits[0]} == "$holders" ]]; then
        kill -KILL "$holders"
        inits=("$fetchers")
    fi
done <"$dir/lines"
status=0
wait "$fetcher" || status=$?
((status == 1)) || fail "after the loss of a host the run ended with $status"
grep -q 'its 2 holders count as lost' "$dir/fetchers.log" ||
    fail "the loss of a host was not told"
is accounted true
is verification_failures 0
(($(value requests) < 500)) || fail "requests were started without holders"
echo "holders' host killed: $(value requests) requests," \
    "$(value blocks_moved) blocks moved, $(value blocks_failed) failed"
