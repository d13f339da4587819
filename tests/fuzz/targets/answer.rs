//! See `tests/harness/src/fuzz/answer.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| harness::fuzz::answer::run(data));
