#!/usr/bin/env bash
# Creates a policy in each language with `berth policy new`, and runs the commands that it prints, word for word: build,
# `berth policy check` and `test`, and then upload, try and activate on a daemon with simulated GPUs. A language whose
# tools are missing is skipped with a message, unless it is given as an argument; then it fails:
#   policies-wasm/try-templates.sh [rust] [c] [js] [python]
# Tools: rust: a Rust that builds for wasm32-unknown-unknown (see build.sh). c: wit-bindgen and zig (or
# `python3 -m ziglang`). js: npm. python: python3 with venv. npm and pip install into the temporary folder.
set -euo pipefail
cd "$(dirname "$0")"

berth=${BERTH:-${CARGO_TARGET_DIR:-../target}/debug/berth}
berth=$(realpath "$berth")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
target=wasm32-unknown-unknown
passed=0 skipped=0 failed=0

# Prints what is missing for a language; nothing if all tools are installed.
missing() {
    case $1 in
    rust)
        [ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || [ -d /usr/lib/rustlib/src/rust/library ] ||
            echo "no Rust that builds for $target (rustup target add $target)" ;;
    c)
        command -v wit-bindgen >/dev/null || { echo "no wit-bindgen (cargo install wit-bindgen-cli)"; return; }
        command -v zig >/dev/null || python3 -c 'import ziglang' 2>/dev/null ||
            echo "no zig (pip install ziglang)" ;;
    js) command -v npm >/dev/null || echo "no npm" ;;
    python) python3 -c 'import venv, ensurepip' 2>/dev/null || echo "no python3 with venv" ;;
    esac
}

# The commands of one step that `berth policy new` printed: 1 tools, 2 build and test, 3 upload and activate.
commands() {
    python3 -c 'import json, sys
print("\n".join(json.load(open(sys.argv[1]))["steps"][int(sys.argv[2]) - 1]["commands"]))' "$work/$1.json" "$2"
}

# Debian's rustc builds the standard library from source, as build.sh does, where rustup has no target.
use_debians_rust() {
    local host
    host=$(rustc -vV | sed -n 's/^host: //p')
    export RUSTC_BOOTSTRAP=1 CARGO_UNSTABLE_BUILD_STD=std,panic_abort
    CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$(rustc --print sysroot)/lib/rustlib/$host/bin/rust-lld"
    export CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER
    export RUSTC=/usr/bin/rustc
}

try() {
    set -e
    "$berth" policy new my-trial --lang "$1" --dir "$work/$1" -o json >"$work/$1.json"
    cd "$work/$1"
    # A separate target folder: the artifacts must not be confused with those of this repository.
    unset CARGO_TARGET_DIR
    # The steps are run word for word, except that tools that are there already are not installed again.
    case $1 in
    rust)
        cargo test --quiet
        [ -d "$(rustc --print sysroot)/lib/rustlib/$target" ] || use_debians_rust ;;
    c) command -v zig >/dev/null || export ZIG="python3 -m ziglang" ;;
    *) commands "$1" 1 | sh -e >tools.log 2>&1 || { cat tools.log; return 1; } ;;
    esac
    commands "$1" 2 | sh -e
    # `try` fails if the policy would not be activated.
    commands "$1" 3 | sh -e >activate.log 2>&1 || { cat activate.log; return 1; }
    grep -q "my-trial" activate.log
    "$berth" policy reset >/dev/null
    "$berth" policy delete my-trial >/dev/null
}

# A node of its own for step 3, on a free port.
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
mkdir "$work/kubelet"
"$berth" serve --gpus sim:2xl4 --kubelet-dir "$work/kubelet" --state-dir "$work/state" \
    --admin-listen "127.0.0.1:$port" 2>"$work/serve.log" >&2 &
daemon=$!
trap 'kill $daemon; rm -rf "$work"' EXIT
export BERTH_SERVER=http://127.0.0.1:$port BERTH_TOKEN_FILE=$work/state/token
PATH=$(dirname "$berth"):$PATH
for _ in $(seq 100); do
    "$berth" node show >/dev/null 2>&1 && break
    kill -0 $daemon || { cat "$work/serve.log"; exit 1; }
    sleep 0.1
done

for lang in "${@:-all}"; do
    for each in $([ "$lang" = all ] && echo rust c js python || echo "$lang"); do
        why=$(missing "$each")
        if [ -n "$why" ]; then
            echo "$each: skipped: $why"
            skipped=$((skipped + 1))
            [ "$lang" = all ] || failed=$((failed + 1))
            continue
        fi
        echo "$each:"
        # In a subshell, and not in a condition, where `set -e` would have no effect.
        set +e
        (try "$each")
        code=$?
        set -e
        if [ $code = 0 ]; then passed=$((passed + 1)); else failed=$((failed + 1)); echo "$each: FAILED"; fi
    done
done
echo "templates: $passed passed, $failed failed, $skipped skipped"
[ $failed = 0 ]
