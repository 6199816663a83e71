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

build_suite() {
    ninja -C "$build" conformance_suite >"$work/build.log" 2>&1
}

# The status of a case in the copy. A hang is cut short and counts as caught.
run_case() {
    # The shell itself would report a crash, which is not worth a line.
    {
        KVT_TEST_SOURCE_DIR=$tree KVT_TEST_WAIT_S=5 timeout -k 5 90 \
            "$build/tests/conformance_suite" fault:local "$1" \
            >"$work/case.log" 2>&1
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
    cp -p "$path" "$work/saved"
    replace "$work/saved" "$after" "$old" "$new" "$path"
    build_suite || {
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
    if [[ " $checked " != *" $test "* ]]; then
        checked+=" $test"
        run_case "$test" || {
            cat "$work/case.log" >&2
            fail "$test fails without any break"
        }
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
build_suite || {
    cat "$work/build.log" >&2
    fail "does not build"
}

lost=0
each_break check_line
((lost == 0)) || fail "$lost breaks do not fit the source any more"
checked=''
each_break check_unbroken
tried=0
missed=0
each_break try_break
echo "$tried breaks, $missed not caught"
((tried > 0 && missed == 0))
