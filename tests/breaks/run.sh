#!/usr/bin/env bash
# Proves that the tests catch what they are there for: applies each one-line
# break of breaks.txt in a copy of the tree, builds it, and runs the test named
# for it, which must fail. "run.sh PATTERN" tries only the breaks whose name
# matches the shell pattern.
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
source=$(cd "$here/../.." && pwd)
pattern=${1:-*}
work=$(mktemp -d)
tree=$work/tree
build=$work/build
trap 'rm -rf "$work"' EXIT

fail() {
    echo "$*" >&2
    exit 1
}

# The program of a test, "CASE" of the suite, "SUBJECT:CASE" of a unit test,
# "history:ENGINE", or "nth:CASE".
program() {
    case $1 in
    history:*) echo history_checker ;;
    nth:*) echo test_nth_nixl ;;
    *:*) echo "test_unit_${1%%:*}" ;;
    *) echo conformance_suite ;;
    esac
}

build_test() {
    ninja -C "$build" "$(program "$1")" fake_nixl_capi fake_libcuda \
        >"$work/build.log" 2>&1
}

# The status of a case in the copy. A hang is cut short and counts as caught.
run_case() {
    local arguments=("${1#*:}")
    case $1 in
    history:*) arguments=(--engine "${1#*:}" --ops 1200 --shrink 0) ;;
    *:*) ;;
    *) arguments=(fault:local "$1") ;;
    esac
    # The shell itself would report a crash, which is not worth a line.
    {
        KVT_TEST_SOURCE_DIR=$tree KVT_TEST_WAIT_S=5 \
            KVT_TEST_FAKE_NIXL=$build/tests/libfake_nixl_capi.so \
            LD_LIBRARY_PATH=$build/tests/fake_libcuda \
            timeout -k 5 90 "$build/tests/$(program "$1")" \
            "${arguments[@]}" >"$work/case.log" 2>&1
    } 2>/dev/null
}

# Replaces the first occurrence of $3 in file $1 behind text $2 by $4; the file
# goes to $5. Fails when there is none.
replace() {
    AFTER=$2 OLD=$3 NEW=$4 awk '
        BEGIN { seen = ENVIRON["AFTER"] == "" }
        seen && !done && (at = index($0, ENVIRON["OLD"])) > 0 {
            rest = substr($0, at + length(ENVIRON["OLD"]))
            $0 = substr($0, 1, at - 1) ENVIRON["NEW"] rest
            done = 1
        }
        index($0, ENVIRON["AFTER"]) > 0 { seen = 1 }
        { print }
        END { exit !done }' "$1" >"$5"
}

# One stanza, in name, file, after, old, new and test.
try_break() {
    local path=$tree/src/$file rc=0 verdict
    if [[ " $unable " == *" $test "* ]]; then
        printf '%-42s left out: %s cannot run here\n' "$name" "$test"
        return
    fi
    cp -p "$path" "$work/saved"
    replace "$work/saved" "$after" "$old" "$new" "$path"
    build_test "$test" || {
        cat "$work/build.log" >&2
        fail "$name: does not build"
    }
    run_case "$test" || rc=$?
    cp "$work/saved" "$path" # a new time: it is built again
    case $rc in
    0 | 77) verdict="NOT CAUGHT by" ;;
    *) verdict="caught by" ;;
    esac
    printf '%-42s %s %s\n' "$name" "$verdict" "$test"
    tried=$((tried + 1))
    if [[ $verdict == NOT* ]]; then
        missed=$((missed + 1))
    fi
}

end_stanza() {
    # shellcheck disable=SC2053 # the pattern is one
    if [[ -n $name && $name == $pattern ]]; then
        "$1"
    fi
    name='' file='' after='' old='' new='' test=''
}

# Calls $1 for each stanza that matches.
each_break() {
    local line word rest
    name='' file='' after='' old='' new='' test=''
    while IFS= read -r line; do
        word=${line%% *} rest=${line#* }
        if [[ $word == "$line" ]]; then
            rest=''
        fi
        case $word in
        break) end_stanza "$1" && name=$rest ;;
        file) file=$rest ;;
        after) after=$rest ;;
        -) old=$rest ;;
        +) new=$rest ;;
        test) test=$rest ;;
        '' | '#'*) ;;
        *) fail "breaks.txt: $line" ;;
        esac
    done <"$here/breaks.txt"
    end_stanza "$1"
}

check_line() {
    replace "$tree/src/$file" "$after" "$old" "$new" /dev/null || {
        echo "$name: src/$file has no such line: $old" >&2
        lost=$((lost + 1))
    }
}

check_unbroken() {
    local rc=0
    if [[ " $checked " != *" $test "* ]]; then
        checked+=" $test"
        build_test "$test" || {
            cat "$work/build.log" >&2
            fail "$test does not build"
        }
        run_case "$test" || rc=$?
        if ((rc == 77)); then
            unable+=" $test"
        elif ((rc != 0)); then
            cat "$work/case.log" >&2
            fail "$test fails without any break"
        fi
    fi
}

mkdir "$tree"
tar -C "$source" --exclude=./build --exclude=./.git -cf - . |
    tar -C "$tree" -xf -
cmake -S "$tree" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=Debug \
    "-DCMAKE_C_FLAGS_DEBUG=-O1 -g" -DKVT_TESTS=ON -DKVT_TOOLS=OFF \
    >"$work/configure.log" 2>&1 || {
    cat "$work/configure.log" >&2
    fail "cannot configure"
}

lost=0
each_break check_line
((lost == 0)) || fail "$lost breaks do not fit the source any more"
checked='' unable=''
each_break check_unbroken
tried=0
missed=0
each_break try_break
echo "$tried breaks, $missed not caught"
((tried > 0 && missed == 0))
