#!/usr/bin/env bash
# Creates a policy in each language with `berth policy new`, builds it with the commands of its README, and runs
# `berth policy check` and `berth policy test` on it. A language whose tools are missing is skipped with a message,
# unless it is given as an argument; then it fails:
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

build_rust() {
    cargo test --quiet
    if [ -d "$(rustc --print sysroot)/lib/rustlib/$target" ]; then
        cargo build --quiet --release --target "$target"
    else
        # Debian's rustc builds the standard library from source, as build.sh does.
        local host
        host=$(rustc -vV | sed -n 's/^host: //p')
        RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 \
            CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$(rustc --print sysroot)/lib/rustlib/$host/bin/rust-lld" \
            cargo build --quiet --release -Zbuild-std=std,panic_abort --target "$target"
    fi
}
build_c() {
    command -v zig >/dev/null || export ZIG="python3 -m ziglang"
    sh build.sh
}
build_js() {
    npm install --silent --no-fund --no-audit
    npm run --silent build >build.log || { cat build.log; return 1; }
}
build_python() {
    python3 -m venv build/venv
    build/venv/bin/pip install --quiet --disable-pip-version-check -r requirements.txt
    build/venv/bin/componentize-py --quiet -d wit -w policy componentize --stub-wasi app -o build/my_trial.wasm
}
module() {
    if [ "$1" = rust ]; then
        echo "${CARGO_TARGET_DIR:-target}/$target/release/berth_policy_my_trial.wasm"
    else
        echo build/my_trial.wasm
    fi
}

try() {
    set -e
    "$berth" policy new my-trial --lang "$1" --dir "$work/$1" >/dev/null
    cd "$work/$1"
    # A separate target folder: the artifacts must not be confused with those of this repository.
    unset CARGO_TARGET_DIR
    "build_$1"
    "$berth" policy check "$(module "$1")" | head -n 1
    "$berth" policy test "$(module "$1")" scenarios/
}

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
