#!/usr/bin/env bash
# Installs the package as a user would, with pip, into a virtual environment of
# its own, and runs pytest there: tests/python/run.sh VENV [PYTEST-ARGS...].
# What is installed is kept, so that a second run only compiles what changed.
# PYTHON names the interpreter of a new environment.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
venv=${1:?usage: run.sh VENV [PYTEST-ARGS...]}
shift

if ! "$venv/bin/python" -c 'import pytest_rerunfailures' 2>/dev/null; then
    rm -rf "$venv"
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
        'scikit-build-core>=0.10' 'cmake>=3.25' ninja numpy pytest \
        pytest-rerunfailures
fi
venv=$(cd "$venv" && pwd)
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    --no-build-isolation --no-deps \
    --config-settings "build-dir=$venv/kvt" "$root"

# Not in the repository's root: what is tested is what was installed.
cd "$root/tests/python"
exec "$venv/bin/python" -m pytest -c "$root/pyproject.toml" \
    --rootdir "$root" -p no:cacheprovider "${@:-.}"
