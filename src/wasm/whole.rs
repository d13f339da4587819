//! Whether a file of WebAssembly is all there. A copy that broke off is the usual damage, and what the
//! parsers say of it helps nobody.

use super::compile_child::{COMPONENT, CORE};

/// A section's size is a number of 32 bits in groups of 7.
const SIZE_BYTES_MAX: usize = 5;

/// Walks over the sections of a core module or a component: each begins with one byte that says its kind
/// and the number of bytes that follow. What is in them is the parser's.
///
/// # Errors
/// In words, if the file ends before its last section does. A file that was cut just between two sections
/// is whole by this measure.
pub(super) fn check(module: &[u8]) -> Result<(), String> {
    let bytes = module.len();
    if bytes == 0 {
        return Err("the file is empty: build it or copy it again".to_owned());
    }
    let magic = [CORE, COMPONENT];
    if magic.iter().any(|magic| bytes < magic.len() && magic.starts_with(module)) {
        return Err(cut_short(bytes, "its first words alone"));
    }
    if !magic.iter().any(|magic| module.starts_with(magic)) {
        // Something else, of which others say what.
        return Ok(());
    }
    let mut at = CORE.len();
    while at < bytes {
        // The kind of a section; the size comes behind it.
        let Some((size, behind)) = size(module, at + 1) else { return unreadable(module, at) };
        let end = behind.saturating_add(size);
        if end > bytes {
            return Err(cut_short(bytes, &format!("{} more must follow", end - bytes)));
        }
        at = end;
    }
    Ok(())
}

/// The size that is written at `at`, and where it ends. `None` if it is none, or the file ends within it.
fn size(module: &[u8], at: usize) -> Option<(usize, usize)> {
    let mut size = 0_usize;
    for (place, byte) in module.get(at..)?.iter().take(SIZE_BYTES_MAX).enumerate() {
        size |= usize::from(byte & 0x7f) << (7 * place);
        if byte & 0x80 == 0 {
            return Some((size, at + place + 1));
        }
    }
    None
}

/// Either the file ends within a size, or that is none: then the parser says so.
fn unreadable(module: &[u8], at: usize) -> Result<(), String> {
    if module.len() - at <= SIZE_BYTES_MAX {
        return Err(cut_short(module.len(), "it ends within the head of a section"));
    }
    Ok(())
}

fn cut_short(bytes: usize, why: &str) -> String {
    format!(
        "the file is not a whole WebAssembly component: it has {bytes} bytes and breaks off ({why}); copy it or build \
         it again"
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
    fn a_file_that_is_cut_anywhere_is_told_in_plain_words() {
        let whole = component();
        assert_eq!(check(&whole), Ok(()));
        let cuts = (1..200).chain((200..whole.len()).step_by(997)).chain([whole.len() - 1]);
        let mut short = 0;
        for cut in cuts {
            let Err(words) = check(&whole[..cut]) else { continue };
            short += 1;
            assert!(words.contains(&format!("it has {cut} bytes and breaks off")), "{words}");
            assert!(words.contains("copy it or build it again"), "{words}");
        }
        // All but those just between two sections.
        assert!(short > 280, "{short}");
        let words = check(&whole[..whole.len() - 7]).unwrap_err();
        assert!(words.contains("7 more must follow"), "{words}");
    }

    #[test]
    fn what_is_no_webassembly_is_left_to_others() {
        assert_eq!(check(b"hello"), Ok(()));
        assert_eq!(check(CORE), Ok(()));
        assert!(check(b"").unwrap_err().contains("empty"));
    }

    #[test]
    fn no_words_of_a_parser_that_panics_reach_the_reader() {
        // A core module whose section `component-type` holds a size beyond its end: its decoder panics.
        let mut module = CORE.to_vec();
        let name = b"component-type:x";
        let body = [&[u8::try_from(name.len()).unwrap()][..], name, &[0xff; 3]].concat();
        module.push(0);
        module.push(u8::try_from(body.len()).unwrap());
        module.extend(body);
        let Reply::Refused(words) = compile_or_refuse(module) else { panic!("it is taken") };
        for word in ["range", "index", "panicked", "slice"] {
            assert!(!words.contains(word), "{words}");
        }
    }
}
