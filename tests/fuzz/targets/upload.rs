//! See `tests/harness/src/fuzz/upload.rs`.
#![no_main]

mod room;

use std::sync::Once;

static HOOK: Once = Once::new();

libfuzzer_sys::fuzz_target!(
    init: room::compiler(),
    |data: &[u8]| {
        // libFuzzer's own hook ends the process at every panic, and those of the compiler's libraries are
        // caught and reported as a refusal. An uncaught one still ends it.
        HOOK.call_once(|| std::panic::set_hook(Box::new(|panic| eprintln!("{panic}"))));
        harness::fuzz::upload::run(room::policies(), data);
    }
);
