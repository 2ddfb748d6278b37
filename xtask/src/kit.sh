#!/bin/sh
# Runs sdrun on this machine, with nothing but what lies beside this file: no network, no compiler, no Python.
#
#   sh run.sh                       runs `sdrun selftest` and writes sdrun-selftest.html into the current folder
#   sh run.sh selftest -p PROVIDER  the same for one provider, and so on
#   sh run.sh bench --suite quick   any other command of sdrun
#
# The first run checks the parts and unpacks them beside this file.
set -eu
umask 022

here=$(cd "$(dirname "$0")" && pwd)
kit=$here/sdrun-kit

fail() {
    echo "error: $1" >&2
    exit 1
}

# Prints the SHA-256 of a file.
digest() {
    if command -v sha256sum >/dev/null 2>&1; then
        sha256sum "$1" | cut -d ' ' -f 1
    elif command -v shasum >/dev/null 2>&1; then
        shasum -a 256 "$1" | cut -d ' ' -f 1
    elif command -v openssl >/dev/null 2>&1; then
        openssl dgst -sha256 -r "$1" | cut -d ' ' -f 1
    else
        fail "sha256sum, shasum or openssl is needed to check the parts"
    fi
}

unpack() {
    [ -f "$here/SHA256SUMS" ] || fail "SHA256SUMS is missing: copy all files of the kit into one folder"
    while read -r sum name; do
        [ -f "$here/$name" ] || fail "$name is missing: copy all files of the kit into one folder"
        found=$(digest "$here/$name")
        [ "$found" = "$sum" ] || fail "$name is damaged: copy it again"
    done <"$here/SHA256SUMS"
    rm -rf "$kit" "$here/unpacking"
    mkdir "$here/unpacking"
    # -o: the files belong to the user who unpacks them, as sdrun demands of plugins.
    cat "$here"/kit.part-* | gzip -dc | (cd "$here/unpacking" && tar -xof -) || fail "the kit cannot be unpacked: is the disk full?"
    cp "$here/SHA256SUMS" "$here/unpacking/sdrun-kit/SHA256SUMS"
    mv "$here/unpacking/sdrun-kit" "$kit"
    rm -rf "$here/unpacking"
}

# Another kit in the same folder is unpacked anew.
if [ ! -f "$kit/SHA256SUMS" ] || [ "$(digest "$kit/SHA256SUMS")" != "$(digest "$here/SHA256SUMS")" ]; then
    echo "checking and unpacking the kit"
    unpack
fi

SDRUN_DATA_DIR=$kit/data
SDRUN_CACHE_DIR=$kit/cache
export SDRUN_DATA_DIR SDRUN_CACHE_DIR
if [ $# -eq 0 ]; then
    set -- selftest
fi
exec "$kit/sdrun" "$@"
