#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# In a program that has more rights than whoever starts it, kvt does not hear the
# variables that name a library: a copy of the command that belongs to another
# user and is set-uid must not load the NIXL that KVT_NIXL_LIBRARY names, though
# the command itself does.
set -euo pipefail

give_up() {
    echo "skipped: $1"
    exit 77
}

fail() {
    echo "FAILED: $1"
    exit 1
}

: "${KVT_TEST_COMMAND:?ctest sets it}" "${KVT_TEST_FAKE_NIXL:?ctest sets it}"

((EUID == 0)) || give_up "only root can make such a program"
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
chmod 755 "$dir"

info() {
    env -i "KVT_NIXL_LIBRARY=$KVT_TEST_FAKE_NIXL" "$@"
}

info "$KVT_TEST_COMMAND" info >"$dir/plain" 2>&1 ||
    fail "the command does not run: $(cat "$dir/plain")"
grep -qF "$KVT_TEST_FAKE_NIXL" "$dir/plain" ||
    fail "KVT_NIXL_LIBRARY is not heard by a plain program"

# Whether this file system knows such programs at all: one that says who it is.
cp "$(command -v id)" "$dir/id"
cp "$KVT_TEST_COMMAND" "$dir/kvt"
chown 65534 "$dir/id" "$dir/kvt"
chmod 4755 "$dir/id" "$dir/kvt"
[[ $("$dir/id" -u) == 65534 ]] || give_up "set-uid does nothing here"

info "$dir/kvt" info >"$dir/other" 2>&1 || give_up "the copy does not run"
if grep -qF "$KVT_TEST_FAKE_NIXL" "$dir/other"; then
    fail "KVT_NIXL_LIBRARY is heard by a set-uid program"
fi
grep -q "nixl *missing" "$dir/other" ||
    fail "kvt info says nothing of NIXL: $(cat "$dir/other")"
