#!/usr/bin/env bash
# A file has 600 lines at most, so that a reader can hold it in mind; the
# public header is the reference manual and may be longer. (clang-tidy checks
# the length of functions.)
set -euo pipefail

cd "${KVT_TEST_SOURCE_DIR:-$(dirname "$0")/../..}"
limit=600
failed=0
while IFS= read -r file; do
    lines=$(wc -l <"$file")
    if ((lines > limit)); then
        echo "$file: $lines lines, the limit is $limit"
        failed=1
    fi
done < <(
    find bench python src tools -type f -name '*.[ch]'
    find . \( -name build -o -name .git \) -prune -o \
        -path ./src -prune -o -path ./tools -prune -o \
        -path ./python -prune -o -path ./bench -prune -o \
        -path ./include/kvt/kvt.h -prune -o -type f -name '*.h' -print
)
exit "$failed"
