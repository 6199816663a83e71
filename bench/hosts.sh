#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Two hosts, as far as one machine can be two: network, pid, ipc, uts and mount
# namespaces of their own, with their own /proc, /sys and /dev/shm, joined by a
# veth pair. Files are shared, so a socket's path reaches from one to the other.
#
#   hosts.sh up NAME               makes hosts a and b; prints A=ADDRESS B=ADDRESS
#   hosts.sh run NAME a|b CMD...   runs a command on one of them
#   hosts.sh down NAME             ends them and all that runs there
#
# Exit status 77: this machine does not allow it; the reason is on stderr.
set -euo pipefail

usage() {
    sed -n 's/^# *\(hosts.sh .*\)/\1/p' "$0" >&2
    exit 2
}

give_up() {
    echo "hosts.sh: $1" >&2
    exit 77
}

word=${1:-}
name=${2:-}
[[ $name =~ ^[A-Za-z0-9_-]+$ ]] || usage
shift 2
state=${TMPDIR:-/tmp}/kvt-hosts-$name
kinds=(--net --pid --ipc --uts --mount)

check_machine() {
    local tool why
    for tool in ip nsenter unshare; do
        command -v "$tool" >/dev/null ||
            give_up "two hosts need the program $tool (iproute2, util-linux)"
    done
    ((EUID == 0)) || give_up "two network namespaces need root"
    why=$(unshare --fork "${kinds[@]}" --mount-proc sh -c '
        mount -t tmpfs tmpfs /dev/shm && mount -t sysfs sysfs /sys &&
        ip link add kvt0 type veth peer name kvt1' 2>&1) ||
        give_up "this machine allows no network namespaces: $why"
}

# make_host HOST leaves the number of its first process in the state folder. Its
# outer process takes that one with it, and that all others.
make_host() {
    local outer answer children
    mkfifo "$state/$1.says"
    # shellcheck disable=SC2016
    setsid unshare --fork --kill-child "${kinds[@]}" --mount-proc sh -c '
        hostname "$1" && mount -t tmpfs tmpfs /dev/shm &&
        mount -t sysfs sysfs /sys && ip link set lo up &&
        echo stands >"$2" || echo "does not stand" >"$2"
        exec sleep infinity' sh "$1" "$state/$1.says" \
        </dev/null >/dev/null 2>"$state/$1.log" &
    outer=$!
    disown "$outer"
    echo "$outer" >"$state/$1.outer"
    read -r answer <"$state/$1.says"
    [[ $answer == stands ]] || give_up "$(cat "$state/$1.log")"
    # It has no newline, which read takes for a failure.
    read -r children <"/proc/$outer/task/$outer/children" || true
    echo "${children%% *}" >"$state/$1"
}

# on HOST COMMAND...
on() {
    local pid
    pid=$(cat "$state/$1") || give_up "there is no host $1 of $name: run up"
    shift
    exec nsenter --target "$pid" --net --pid --ipc --uts --mount -- "$@"
}

# Both ends run when the kernel says so, up to a second after they were set up,
# and UCX takes no card before. The files change under us: there is nothing to
# wait on.
wait_for_cable() {
    local host up
    for host in a b; do
        up=
        until [[ $up == up ]]; do
            up=$(on "$host" cat /sys/class/net/eth0/operstate)
        done
    done
}

up() {
    check_machine
    mkdir -m 700 "$state" ||
        give_up "hosts called $name stand already: take them down first"
    trap 'down' ERR
    make_host a
    make_host b
    ip link add eth0 netns "$(cat "$state/a")" type veth \
        peer name eth0 netns "$(cat "$state/b")"
    (on a ip addr add 10.78.0.1/24 dev eth0)
    (on b ip addr add 10.78.0.2/24 dev eth0)
    (on a ip link set eth0 up)
    (on b ip link set eth0 up)
    wait_for_cable
    trap - ERR
    echo "A=10.78.0.1 B=10.78.0.2"
}

# Only what is ours is killed: a number may be another process's by now.
down() {
    local file pid
    for file in "$state"/*.outer; do
        [[ -f $file ]] || continue
        pid=$(cat "$file")
        if [[ $(cat "/proc/$pid/comm" 2>/dev/null) == unshare ]]; then
            kill -KILL "$pid"
        fi
    done
    rm -rf "$state"
}

case $word in
up) up ;;
down) down ;;
run)
    host=${1:-}
    [[ $host == [ab] ]] || usage
    shift
    (($# > 0)) || usage
    on "$host" "$@"
    ;;
*) usage ;;
esac
