//! Files that a daemon reads while a test changes them.

use std::fs;
use std::path::Path;

/// Replaces a file as a whole: the text is written beside it and renamed into its place, so that a daemon never reads
/// an empty or half-written one.
pub(crate) fn replace(file: &Path, text: impl AsRef<[u8]>) {
    let beside = file.with_extension("new");
    fs::write(&beside, text).unwrap();
    fs::rename(beside, file).unwrap();
}
