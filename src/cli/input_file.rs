//! Files that a command reads.

use anyhow::{Context, bail};
use std::io::Read;
use std::path::Path;

/// The bytes of a file; `-` is standard input.
///
/// # Errors
/// If it cannot be read, or has more than `limit` bytes.
pub fn read_file(file: &Path, limit: u64) -> anyhow::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let reading = || format!("cannot read {}", file.display());
    if file == Path::new("-") {
        std::io::stdin().take(limit + 1).read_to_end(&mut bytes).with_context(reading)?;
    } else {
        let opened = std::fs::File::open(file).with_context(reading)?;
        opened.take(limit + 1).read_to_end(&mut bytes).with_context(reading)?;
    }
    if u64::try_from(bytes.len())? > limit {
        bail!("{} is larger than the limit of {limit} bytes", file.display());
    }
    Ok(bytes)
}
