#!/usr/bin/env bash
# Builds the shipped policies and writes prebuilt/. Only needed after a change of a policy, the SDK or
# the WIT: the daemon embeds the committed files.
#
# Uses rustup's target wasm32-unknown-unknown if it is installed (`rustup target add
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
# Paths of the build machine must not be in an artifact: its digest would depend on them, and they
# would reveal where it was built.
remap() { printf -- '--remap-path-prefix=%s=%s' "$1" "$2"; }
CARGO_ENCODED_RUSTFLAGS=$(remap "$PWD" policies-wasm)$'\x1f'$(remap "${CARGO_HOME:-$HOME/.cargo}" cargo)
CARGO_ENCODED_RUSTFLAGS+=$'\x1f'$(remap /usr/lib/rustlib/src/rust rust)
# Less stack than the default of 1 MiB: the memory that a call writes to is then in a few pages at the
# front, which the daemon keeps and clears instead of unmapping them.
CARGO_ENCODED_RUSTFLAGS+=$'\x1f'-Clink-arg=-zstack-size=65536
# Enough initial memory for calls on all but the largest nodes: an untouched page costs nothing,
# whereas growing the memory costs two system calls in every call.
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
# The tool below runs on the build machine and is not shipped, so it needs none of these flags.
unset CARGO_ENCODED_RUSTFLAGS

mkdir -p prebuilt
cargo run --quiet --release --locked --package componentize --target-dir "$folder" -- \
    "$PWD" "$folder/$target/release" "$toolchain" "${policies[@]}"
ls -l prebuilt
