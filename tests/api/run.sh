#!/usr/bin/env bash
# run.sh lint|fuzz ARGS: installs the outside tools under .cache/api, at the versions that are written down
# here, and runs them against target/debug/berth on simulated GPUs. Needs python3 with venv; lint needs npm and Go.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=$here/../../.cache/api
mkdir -p "$cache"

venv=$cache/venv
if ! cmp -s "$here/requirements.txt" "$venv/installed.txt"; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r "$here/requirements.txt"
    cp "$here/requirements.txt" "$venv/installed.txt"
fi
if [ "$1" = lint ] && ! cmp -s "$here/package.json" "$cache/npm/package.json"; then
    rm -rf "$cache/npm"
    mkdir -p "$cache/npm"
    cp "$here/package.json" "$cache/npm/"
    # Without scripts of packages; a failure leaves no package.json, so the next run installs again.
    (cd "$cache/npm" && npm install --silent --no-audit --no-fund --ignore-scripts --no-package-lock) ||
        { rm -f "$cache/npm/package.json"; exit 1; }
fi
exec "$venv/bin/python" "$here/$1.py" "${@:2}"
