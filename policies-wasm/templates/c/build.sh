#!/bin/sh
# Builds build/my_policy.wasm. Needs wit-bindgen, which generates the types of the contract, and zig, which is a C
# compiler for WebAssembly (set ZIG="python3 -m ziglang" if it was installed by pip).
set -eu
cd "$(dirname "$0")"
mkdir -p build
wit-bindgen c wit --world policy --out-dir bindings
${ZIG:-zig} cc --target=wasm32-wasi -mexec-model=reactor -Os -s -Wall -Wextra -Wno-unused-parameter \
    -Wl,--stack,65536 -Ibindings -o build/my_policy.wasm guest.c bindings/policy.c bindings/policy_component_type.o
