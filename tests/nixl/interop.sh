#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# interop.sh FILE... runs tests/nixl/interop/FILE... with the pytest of the
# virtual environment KVT_TEST_NIXL_15; tests/support/with_nixl.sh has seen to it
# that both environments are there.
set -eu

cd "$(dirname "${BASH_SOURCE[0]}")/interop"
unset KVT_NIXL_LIBRARY VIRTUAL_ENV
export PYTHONDONTWRITEBYTECODE=1
exec "$KVT_TEST_NIXL_15/bin/python" -m pytest -p no:cacheprovider -q "$@"
