#!/usr/bin/env bash
# Builds the shipped policies and writes prebuilt/. Only needed after a change of a policy, the SDK or
# the WIT: the daemon embeds what is committed there.
#
# Uses rustup's wasm32-unknown-unknown where that is installed (`rustup target add
# wasm32-unknown-unknown`), else Debian's rustc, which builds the standard library from source:
#   apt-get install --no-install-recommends rustc-web rust-web-src
set -euo pipefail
cd "$(dirname "$0")"

policies=(
    exclusive timeslice mixed
    binpack spread topology
    memory quota triage-xid
)
target=wasm32-unknown-unknown
folder=${CARGO_TARGET_DIR:-$PWD/target}
sysroot=$(rustc --print sysroot)
packages=("${policies[@]/#/--package=berth-policy-}")
# No path of the machine belongs into an artifact: it would change its digest and tell its maker.
remap() { printf -- '--remap-path-prefix=%s=%s' "$1" "$2"; }
CARGO_ENCODED_RUSTFLAGS=$(remap "$PWD" policies-wasm)$'\x1f'$(remap "${CARGO_HOME:-$HOME/.cargo}" cargo)
CARGO_ENCODED_RUSTFLAGS+=$'\x1f'$(remap /usr/lib/rustlib/src/rust rust)
# Less stack than the usual MiB: what a call touches then lies in few pages at the front of its
# memory, which the daemon keeps and clears instead of giving them back.
CARGO_ENCODED_RUSTFLAGS+=$'\x1f'-Clink-arg=-zstack-size=65536
# Enough from the start for a call about any but the largest nodes: a page that is not touched costs
# nothing, and growing costs two system calls a call.
CARGO_ENCODED_RUSTFLAGS+=$'\x1f'-Clink-arg=--initial-memory=524288
export CARGO_ENCODED_RUSTFLAGS

if [ -d "$sysroot/lib/rustlib/$target" ]; then
    toolchain=$(rustc --version)
    cargo build --release --locked --target "$target" --target-dir "$folder" "${packages[@]}"
elif [ -x /usr/bin/rustc ] && [ -d /usr/lib/rustlib/src/rust/library ]; then
    toolchain="$(/usr/bin/rustc --version), Debian"
    host=$(rustc -vV | sed -n 's/^host: //p')
    RUSTC=/usr/bin/rustc RUSTC_BOOTSTRAP=1 \
        CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$sysroot/lib/rustlib/$host/bin/rust-lld" \
        cargo build --release --locked -Zbuild-std=std,panic_abort \
        --target "$target" --target-dir "$folder" "${packages[@]}"
else
    echo "build.sh: no Rust that builds for $target; see the first lines of this file" >&2
    exit 1
fi
# The tool below is built for this machine and stays here.
unset CARGO_ENCODED_RUSTFLAGS

mkdir -p prebuilt
cargo run --quiet --release --locked --package componentize --target-dir "$folder" -- \
    "$PWD" "$folder/$target/release" "$toolchain" "${policies[@]}"
ls -l prebuilt
