//! Detects truncated WebAssembly files. Incomplete copies are the usual damage, and the parsers' errors do not name
//! them.

use super::compile_child::{COMPONENT, CORE};

/// Longest encoding of a section's size: a 32-bit LEB128 number.
const SIZE_BYTES_MAX: usize = 5;

/// Checks that all sections of a core module or a component are complete. A section begins with a byte for its kind
/// and its size in bytes; the content is left to the parser.
///
/// # Errors
/// If the file ends within a section. A file that was truncated between two sections is not detected.
pub(super) fn check(module: &[u8]) -> Result<(), String> {
    let bytes = module.len();
    if bytes == 0 {
        return Err("the file is empty: build it or copy it again".to_owned());
    }
    let magic = [CORE, COMPONENT];
    if magic.iter().any(|magic| bytes < magic.len() && magic.starts_with(module)) {
        return Err(truncated(bytes, "it ends within the file header"));
    }
    if !magic.iter().any(|magic| module.starts_with(magic)) {
        // Not WebAssembly, which the caller checks.
        return Ok(());
    }
    let mut at = CORE.len();
    while at < bytes {
        // The size follows the byte of the kind.
        let Some((size, content)) = size(module, at + 1) else { return invalid_size(module, at) };
        let end = content.saturating_add(size);
        if end > bytes {
            return Err(truncated(bytes, &format!("{} more must follow", end - bytes)));
        }
        at = end;
    }
    Ok(())
}

/// The size that is encoded at `at`, and the offset behind it. `None` if it is invalid or the file ends within it.
fn size(module: &[u8], at: usize) -> Option<(usize, usize)> {
    let mut size = 0_usize;
    for (index, byte) in module.get(at..)?.iter().take(SIZE_BYTES_MAX).enumerate() {
        size |= usize::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((size, at + index + 1));
        }
    }
    None
}

/// An error if the file ends within the size of the section at `at`. Other invalid sizes are left to the parser.
fn invalid_size(module: &[u8], at: usize) -> Result<(), String> {
    if module.len() - at <= SIZE_BYTES_MAX {
        return Err(truncated(module.len(), "it ends within a section header"));
    }
    Ok(())
}

fn truncated(bytes: usize, detail: &str) -> String {
    format!(
        "the file is not a complete WebAssembly component: it has {bytes} bytes and breaks off ({detail}); copy it or \
         build it again"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile_child::compile_or_refuse;
    use crate::frame::Reply;

    fn component() -> Vec<u8> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../policies-wasm/prebuilt/exclusive.wasm");
        std::fs::read(file).unwrap()
    }

    #[test]
    fn a_truncated_file_is_reported() {
        let complete = component();
        assert_eq!(check(&complete), Ok(()));
        let lengths = (1..200).chain((200..complete.len()).step_by(997)).chain([complete.len() - 1]);
        let mut reported = 0;
        for length in lengths {
            let Err(error) = check(&complete[..length]) else { continue };
            reported += 1;
            assert!(error.contains(&format!("it has {length} bytes and breaks off")), "{error}");
            assert!(error.contains("copy it or build it again"), "{error}");
        }
        // All except those that end between two sections.
        assert!(reported > 280, "{reported}");
        let error = check(&complete[..complete.len() - 7]).unwrap_err();
        assert!(error.contains("7 more must follow"), "{error}");
    }

    #[test]
    fn other_files_than_webassembly_are_not_checked() {
        assert_eq!(check(b"hello"), Ok(()));
        assert_eq!(check(CORE), Ok(()));
        assert!(check(b"").unwrap_err().contains("empty"));
    }

    #[test]
    fn the_message_of_a_parser_panic_is_not_shown() {
        // A core module with a section `component-type` whose size exceeds it: the decoder panics.
        let mut module = CORE.to_vec();
        let name = b"component-type:x";
        let body = [&[u8::try_from(name.len()).unwrap()][..], name, &[0xff; 3]].concat();
        module.push(0);
        module.push(u8::try_from(body.len()).unwrap());
        module.extend(body);
        let Reply::Refused(reason) = compile_or_refuse(module) else { panic!("it is accepted") };
        for word in ["range", "index", "panicked", "slice"] {
            assert!(!reason.contains(word), "{reason}");
        }
    }
}
