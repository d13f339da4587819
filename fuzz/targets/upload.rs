//! See `cases/upload.rs`.
#![no_main]

#[path = "../cases/mod.rs"]
mod cases;
mod room;

libfuzzer_sys::fuzz_target!(
    init: room::compiler(),
    |data: &[u8]| cases::upload::run(room::policies(), data)
);
