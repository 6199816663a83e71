#!/usr/bin/env bash
# Nothing in the repository may depend on one machine: no absolute path below
# somebody's home or work folder, and no host name of a package registry.
# Brackets keep the patterns from matching this file.
set -euo pipefail

cd "${KVT_TEST_SOURCE_DIR:-$(dirname "$0")/../..}"
# The tree may belong to another user, a container's for instance.
git=(git -c safe.directory='*')
if ! "${git[@]}" rev-parse --git-dir >/dev/null 2>&1; then
    echo "skipped: not a git repository, so there is no list of files"
    exit 77
fi

paths='(^|[^A-Za-z0-9_.}-])/([w]ork|[r]oot|[h]ome|[U]sers)(/|$)'
hosts='[p]ypi\.org|[p]ythonhosted\.org|[n]pmjs\.org|[c]rates\.io'
hosts+='|[d]eb\.debian\.org|[s]napshot\.debian\.org|[p]roxy\.golang\.org'

# Files not added yet count too: they are what the next commit is made of.
found=$("${git[@]}" ls-files -z --cached --others --exclude-standard |
    xargs -0 -r grep -InE --no-messages -e "$paths" -e "$hosts" --) || true
if [[ -n $found ]]; then
    echo "$found"
    exit 1
fi
