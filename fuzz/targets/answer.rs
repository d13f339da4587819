//! See `cases/answer.rs`.
#![no_main]

#[path = "../cases/mod.rs"]
mod cases;

libfuzzer_sys::fuzz_target!(|data: &[u8]| cases::answer::run(data));
