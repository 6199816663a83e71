#!/usr/bin/env bash
# The table of docs/reliability.md is true: each case that was reported has one
# row, each test it names is there with the case's number in a comment, and no
# test has a number that the table does not give it.
set -euo pipefail

cd "${KVT_TEST_SOURCE_DIR:-$(dirname "$0")/../..}"
page=docs/reliability.md
cases=(
    B01 B03 B05 B06 B08 B09 B11 B13 B15 B16 B17 B19 B20 B22 B23 B25 B26 B27 B29
    B30 B32 B34 B36 B37 B38 B40 B41 B42 B45 B46 B47 B48 B49 B51)

# The comment right above the test, or above its decorators: "/* B12 */",
# "# B12, B13", or "(B12)" at the end of one that says more.
awk -v wanted="${cases[*]}" -v page="$page" '
function complain(text) {
    print text
    failed = 1
}

# What a file says of its tests: said[FILE:CASE], the numbers above each.
function read_tests(file, path, line, above, name) {
    path = "tests/" file
    while ((getline line < path) > 0) {
        if (match(line, /\(?B[0-9][0-9](, B[0-9][0-9])*\)?( \*\/)?$/) &&
            line ~ /^(\/\*| \*|#)/) {
            above = substr(line, RSTART, RLENGTH)
        } else if (match(line, /^(static void|static int|def) [a-z0-9_]+\(/)) {
            name = substr(line, 1, RLENGTH - 1)
            sub(/.* /, "", name)
            said[file ":" name] = above
            there[file ":" name] = 1
            above = ""
        } else if (line == "" || line == "}") {
            above = ""
        }
    }
    close(path)
}

BEGIN {
    count = split(wanted, list, " ")
    while ((getline file < "/dev/stdin") > 0) {
        read_tests(file)
    }
    while ((getline line < page) > 0) {
        if (line !~ /^\| B[0-9][0-9] \|/) {
            continue
        }
        split(line, cell, /[ ]*\|[ ]*/)
        id = cell[2]
        rows[id]++
        tests = cell[5]
        while (match(tests, /`[^`]*`/)) {
            test = substr(tests, RSTART + 1, RLENGTH - 2)
            tests = substr(tests, RSTART + RLENGTH)
            named[id]++
            if (!(test in there)) {
                complain(id ": there is no test " test)
            } else if (index(said[test], id) == 0) {
                complain(id ": " test " does not have the number above it")
            }
            given[test] = given[test] " " id
        }
    }
    for (i = 1; i <= count; i++) {
        known[list[i]] = 1
        if (rows[list[i]] != 1 || named[list[i]] == 0) {
            complain(list[i] ": not one row with tests in " page)
        }
    }
    for (id in rows) {
        if (!(id in known)) {
            complain(id ": a row for a case that is not in the list")
        }
    }
    for (test in said) {
        rest = said[test]
        while (match(rest, /B[0-9][0-9]/)) {
            id = substr(rest, RSTART, RLENGTH)
            rest = substr(rest, RSTART + RLENGTH)
            if (index(given[test], id) == 0) {
                complain(id ": " test " is not in its row")
            }
        }
    }
    exit failed
}' < <(cd tests && find . -name '*.[ch]' -o -name '*.py' | sed 's,^\./,,' |
    LC_ALL=C sort)
