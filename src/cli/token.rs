//! The token that every command sends.

use super::connection::ClientArgs;
use anyhow::{Context, bail};

/// Most bytes that are read of a token file; a token has at most 512.
const TOKEN_BYTES_MAX: u64 = 4 * 1024;

/// The token in the file that is named.
///
/// # Errors
/// If it cannot be read, or its content cannot be a token; the message describes a token file.
pub fn read(args: &ClientArgs) -> anyhow::Result<String> {
    let path = args.token_file();
    let text = berth_files::read_text(&path, TOKEN_BYTES_MAX).with_context(|| {
        format!(
            "cannot read the token file {}: run as root on the node, or give a copy with --token-file or \
             BERTH_TOKEN_FILE (the daemon creates the file when it first starts)",
            path.display()
        )
    })?;
    let token = text.trim();
    // How long one must be is the daemon's to say.
    if token.is_empty() || !token.bytes().all(|b| b.is_ascii_graphic()) {
        let what = if token.is_empty() { "is empty" } else { "holds no token" };
        bail!(
            "the token file {} {what}: a token is one line of visible characters, such as the 64 hex digits that the \
             daemon writes into its token file when it first starts",
            path.display()
        );
    }
    Ok(token.to_owned())
}
