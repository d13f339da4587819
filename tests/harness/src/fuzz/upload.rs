//! `upload`: whatever is uploaded is taken or refused in one line: made a component, compiled, loaded,
//! asked what it is. All that an upload goes through but the compiler's process of its own.

use berth_wasm::WasmPolicies;

/// Longest input, bytes: small ones have every kind of section, and compiling a large one takes long.
pub(crate) const BYTES_MAX: usize = 32 * 1024;

/// Longest refusal, bytes: 2048 of the reason, and what stands before it.
const WORDS_MAX: usize = 2_200;

/// Plays one input.
pub fn run(policies: &WasmPolicies, data: &[u8]) {
    if data.len() > BYTES_MAX {
        return;
    }
    match policies.compile_and_describe(data) {
        Ok((name, component)) => {
            assert!(data.starts_with(b"\0asm"), "{name} is no WebAssembly");
            let label = !name.is_empty() && name.len() <= 63;
            assert!(label && name.bytes().all(|b| b == b'-' || b.is_ascii_alphanumeric()), "{name:?}");
            // What is kept is what is loaded after a restart.
            let again = policies.compile_and_describe(&component).expect("what was taken is taken again");
            assert_eq!(again, (name, component));
        }
        Err(error) => {
            let words = error.to_string();
            assert!(!words.is_empty() && words.len() <= WORDS_MAX && !words.contains('\n'), "{words:?}");
        }
    }
}
