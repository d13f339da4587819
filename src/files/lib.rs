//! Opens regular files without blocking and reads them up to a limit; waits for changes of files.
//!
//! A path from outside may name a FIFO, a device, a socket or a folder. Opening a FIFO blocks until its
//! other end is open, and reading a device may never end, so this crate opens each path that must be a
//! regular file.

mod exposure;
mod folder_events;
pub mod socket;
mod version;
pub mod yaml;

pub use exposure::{Exposure, USABLE_BY_OTHERS, WRITABLE_BY_OTHERS, exposures};
pub use folder_events::FolderEvents;
pub use version::FileVersion;

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Whether a symbolic link at the end of a path is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Links are followed: files of a ConfigMap or a Secret are links.
    Follow,
    /// Links are refused: files that only the daemon writes are never links.
    Refuse,
}

/// Opens a regular file for reading.
///
/// # Errors
/// The system's error; of kind `InvalidInput`, naming the file type, if it is not a regular file.
pub fn open(path: &Path, links: Links) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path, links)
}

/// Opens a regular file with these options, which may create it.
///
/// # Errors
/// As [`open`].
pub fn open_with(options: &mut OpenOptions, path: &Path, links: Links) -> io::Result<File> {
    // Checked before opening: opening a device may have side effects.
    let metadata = match links {
        Links::Follow => fs::metadata(path),
        Links::Refuse => fs::symlink_metadata(path),
    };
    match metadata {
        Ok(metadata) => ensure_regular(metadata.file_type())?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let link_flag = if links == Links::Refuse { libc::O_NOFOLLOW } else { 0 };
    let file = options.custom_flags(libc::O_NONBLOCK | link_flag).open(path)?;
    // Checked again: the file may have been replaced.
    ensure_regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a regular file of at most `bytes_max` bytes; links are followed.
///
/// # Errors
/// As [`open`]; of kind `FileTooLarge` if it is larger.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, Links::Follow)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let message = format!("it is larger than the limit of {bytes_max} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, message));
    }
    Ok(bytes)
}

/// As [`read`], as text.
///
/// # Errors
/// As [`read`]; of kind `InvalidData` if it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let invalid = |_| io::Error::new(ErrorKind::InvalidData, "it is not UTF-8 text");
    String::from_utf8(read(path, bytes_max)?).map_err(invalid)
}

/// Checks that a file type is that of a regular file.
///
/// # Errors
/// Of kind `InvalidInput`, naming the file type.
pub fn ensure_regular(kind: FileType) -> io::Result<()> {
    let found = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {found}, not a regular file")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType as Kind, Mode, mknodat};
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_are_opened_and_opening_does_not_block() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("file"), "text").unwrap();
        fs::create_dir(at("folder")).unwrap();
        symlink(at("file"), at("link")).unwrap();
        symlink("/dev/zero", at("zeros")).unwrap();
        mknodat(CWD, at("fifo"), Kind::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        for (name, what) in
            [("folder", "a folder"), ("fifo", "a FIFO"), ("zeros", "a device"), ("socket", "a socket")]
        {
            let error = read(&at(name), 100).unwrap_err();
            assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains(what), "{error}");
            let mut writing = OpenOptions::new();
            let error = open_with(writing.write(true).create(true), &at(name), Links::Follow).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
        assert_eq!(read_text(&at("link"), 4).unwrap(), "text");
        let error = open(&at("link"), Links::Refuse).unwrap_err();
        assert!(error.to_string().contains("a symbolic link"), "{error}");
        assert_eq!(read(&at("file"), 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
        assert_eq!(open(&at("none"), Links::Refuse).unwrap_err().kind(), ErrorKind::NotFound);
    }
}
