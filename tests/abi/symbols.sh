#!/usr/bin/env bash
# Three lists must be equal: what libkvt.so exports, what src/kvt.map names,
# and what the public header declares KVT_API. A symbol in only one or two of
# them is either missing for users or a promise that nobody meant to make.
set -euo pipefail

header=$KVT_TEST_SOURCE_DIR/include/kvt/kvt.h
map=$KVT_TEST_SOURCE_DIR/src/kvt.map
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# The text of a C file or a linker script as one line, without comments and
# preprocessor lines.
flatten() {
    sed -e 's:\\$:&:' "$1" | awk '
        continued || /^[ \t]*#/ { continued = /\\$/; next }
        { print }
    ' | tr '\n' ' ' | sed -e 's:/\*\([^*]\|\*[^/]\)*\*\+/: :g'
}

# The name is the first word after KVT_API that a parenthesis follows.
flatten "$header" | grep -o 'KVT_API [^;{]*' |
    grep -oE 'kvt_[a-z0-9_]+ *\(.*' | sed -e 's/ *(.*//' |
    sort >"$work/header"

flatten "$map" | sed -e 's/local:[^}]*//g' |
    grep -oE '[A-Za-z0-9_*?]+ *;' | sed -e 's/ *;//' |
    sort >"$work/map"

# Type A is the version node itself.
nm -D --defined-only "$KVT_TEST_LIBRARY" |
    awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    sort >"$work/library"

failed=0
for list in header map library; do
    if [[ ! -s $work/$list ]]; then
        echo "no symbols found in the $list"
        failed=1
    fi
    twice=$(uniq -d "$work/$list")
    if [[ -n $twice ]]; then
        echo "named twice in the $list:"
        echo "$twice"
        failed=1
    fi
done
for pair in header:map map:header map:library library:map; do
    only=$(comm -23 "$work/${pair%:*}" "$work/${pair#*:}")
    if [[ -n $only ]]; then
        echo "in the ${pair%:*} but not in the ${pair#*:}:"
        echo "$only"
        failed=1
    fi
done
echo "$(wc -l <"$work/map") symbols in the map"
exit "$failed"
