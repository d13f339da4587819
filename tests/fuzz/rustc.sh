#!/bin/sh
# RUSTC_WRAPPER of the fuzz targets: instruments the daemon, so that libFuzzer sees which branches an
# input takes, and no library: wasmtime, wasmparser and wit-component have fuzzers of their own. Options
# of stable rustc: LLVM's own pass, inline counters and compared values.
previous=
for argument; do
    if [ "$previous" = --crate-name ] && [ "$argument" = berth ]; then
        exec "$@" -Cpasses=sancov-module \
            -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
            -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
    fi
    previous=$argument
done
exec "$@"
