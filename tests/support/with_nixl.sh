#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# with_nixl.sh 15 COMMAND... runs a test with the NIXL of the virtual environment
# that KVT_TEST_NIXL_15 names (13 likewise), and with no other. Without it, or
# where NIXL does not start, the test is skipped with the reason; it fails with
# KVT_REQUIRE_NIXL=1. ./dev sets all of these.
#
# NIXL and UCX lose races of their own between processes (docs/nixl.md), so with
# KVT_TEST_TRIES=2 a test that failed is run once more, and a line that begins
# with "unsteady" says so; ./dev test repeats it in its summary. Never where a
# sanitizer, an assertion of kvt's or the heap found something, nor where the test
# itself sets KVT_TEST_TRIES=1.
set -u

give_up() {
    if [[ ${KVT_REQUIRE_NIXL:-} == 1 ]]; then
        echo "FAILED, since KVT_REQUIRE_NIXL is 1: $1"
        exit 1
    fi
    echo "skipped: $1"
    exit 77
}

variable=KVT_TEST_NIXL_$1
shift
place=${!variable:-}
if [[ -z $place ]]; then
    give_up "${KVT_TEST_NIXL_WHY:-$variable is not set; ./dev nixl prints it}"
fi
found=("$place"/lib*/python3*/site-packages/.nixl_cu1[23].mesonpy.libs/libnixl_capi.so)
if [[ ! -f ${found[0]} ]]; then
    give_up "$variable is $place, where no wheel of nixl-cu12 is installed"
fi
export VIRTUAL_ENV=$place KVT_NIXL_LIBRARY=${found[0]}
unset KVT_PYTHON

output=$(mktemp)
trap 'rm -f "$output"' EXIT
tries=${KVT_TEST_TRIES:-1}
export KVT_TEST_TRIES=1 # one that is called by this one does not try again

# run COMMAND...
run() {
    "$@" 2>&1 | tee "$output"
    return "${PIPESTATUS[0]}"
}

ours='(Address|Thread|Leak|UndefinedBehavior)Sanitizer|runtime error:'
ours+='|broken invariant|stack smashing|double free|(malloc|free|realloc)\(\): '
ours+='|corrupted (size|double|top|unsorted)'
status=0
run "$@" || status=$?
if ((tries > 1 && status != 0 && status != 77)) &&
    ! grep -qE "$ours" "$output"; then
    printf '\nunsteady: the first of two runs failed with status %d\n' "$status"
    first=$status
    status=0
    run "$@" || status=$?
    ((status != 77)) || status=$first
fi
if ((status == 77)); then
    give_up "the test above ran nothing"
fi
exit "$status"
