#!/bin/sh
# RUSTC_WRAPPER of the fuzz targets: instruments the daemon's crates, so that libFuzzer sees which branches an input takes, but
# no library: wasmtime, wasmparser and wit-component have fuzzers of their own. The options are those of stable rustc: LLVM's
# own pass, inline counters and compared values.
previous=
for argument; do
    case $previous:$argument in
    --crate-name:berth | --crate-name:berth_*)
        exec "$@" -Cpasses=sancov-module \
            -Cllvm-args=-sanitizer-coverage-level=4 \
            -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
            -Cllvm-args=-sanitizer-coverage-pc-table \
            -Cllvm-args=-sanitizer-coverage-trace-compares
        ;;
    esac
    previous=$argument
done
exec "$@"
