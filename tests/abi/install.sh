#!/usr/bin/env bash
# An installed tree works, and works after a move: it is installed under a
# DESTDIR, its example is built from there in the two ways that users have,
# pkg-config and find_package(), and both programs run.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
example=$KVT_TEST_SOURCE_DIR/examples/first.c
prefix=$work/root$KVT_TEST_PREFIX
lib=$prefix/$KVT_TEST_LIBDIR

echo "== install"
DESTDIR=$work/root "$KVT_TEST_CMAKE" --install "$KVT_TEST_BUILD_DIR"
export LD_LIBRARY_PATH=$lib

echo "== the soname carries the minor before 1.0"
readelf -d "$lib/libkvt.so" | grep SONAME
major=${KVT_TEST_VERSION%%.*}
soversion=$major
if [[ $major == 0 ]]; then
    soversion=${KVT_TEST_VERSION%.*}
fi
test -e "$lib/libkvt.so.$soversion"
readelf -d "$lib/libkvt.so" | grep -qF "[libkvt.so.$soversion]"

echo "== pkg-config"
export PKG_CONFIG_PATH=$lib/pkgconfig
test "$(pkg-config --modversion kvt)" = "$KVT_TEST_VERSION"
read -ra flags <<<"$(pkg-config --cflags --libs kvt)"
"$KVT_TEST_CC" -o "$work/first" "$example" "${flags[@]}" -pthread
"$work/first"

echo "== find_package"
"$KVT_TEST_CMAKE" -S "$KVT_TEST_SOURCE_DIR/tests/abi/consumer" \
    -B "$work/consumer" -G Ninja -D CMAKE_PREFIX_PATH="$prefix" \
    -D CMAKE_C_COMPILER="$KVT_TEST_CC" \
    -D SOURCE="$example" -D VERSION="$KVT_TEST_VERSION"
"$KVT_TEST_CMAKE" --build "$work/consumer"
"$work/consumer/consumer"

if [[ -n ${KVT_TEST_COMMAND:-} ]]; then
    echo "== the command finds the library that was installed with it"
    unset LD_LIBRARY_PATH
    found=$(ldd "$prefix/bin/kvt" | awk '/libkvt\.so/ { print $3 }')
    test "$found" -ef "$lib/libkvt.so"
fi
