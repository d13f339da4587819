//! Regular files, opened without waiting and read up to a limit.
//!
//! A path that an operator, a package or an attacker filled may hold a FIFO, a device, a socket or a
//! folder. Opening a FIFO waits for its other end, and reading a device may never end, so each path
//! that must hold a file is opened here.

pub mod socket;
pub mod yaml;

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Whether a symbolic link at the end of a path is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Followed: files of a ConfigMap or a Secret are links.
    Follow,
    /// Refused: files that only the daemon itself writes are none.
    Refuse,
}

/// Opens a regular file for reading.
///
/// # Errors
/// As the system; of kind `InvalidInput`, naming what is there, if it is no regular file.
pub fn open(path: &Path, links: Links) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path, links)
}

/// Opens a regular file with these options, which may create it.
///
/// # Errors
/// As [`open`].
pub fn open_with(options: &mut OpenOptions, path: &Path, links: Links) -> io::Result<File> {
    // Before it is opened: opening a device may already do something.
    let found = match links {
        Links::Follow => fs::metadata(path),
        Links::Refuse => fs::symlink_metadata(path),
    };
    match found {
        Ok(found) => regular(found.file_type())?,
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let no_links = if links == Links::Refuse { libc::O_NOFOLLOW } else { 0 };
    let file = options.custom_flags(libc::O_NONBLOCK | no_links).open(path)?;
    // Again: it may have been replaced in between.
    regular(file.metadata()?.file_type())?;
    Ok(file)
}

/// Reads a regular file of at most so many bytes; links are followed.
///
/// # Errors
/// As [`open`]; of kind `FileTooLarge` if it is larger.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open(path, Links::Follow)?.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > bytes_max {
        let what = format!("it is larger than the limit of {bytes_max} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, what));
    }
    Ok(bytes)
}

/// The same as text.
///
/// # Errors
/// As [`read`]; of kind `InvalidData` if it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: u64) -> io::Result<String> {
    let invalid = |_| io::Error::new(ErrorKind::InvalidData, "it is not text in UTF-8");
    String::from_utf8(read(path, bytes_max)?).map_err(invalid)
}

/// Accepts a regular file.
///
/// # Errors
/// Of kind `InvalidInput`, naming what it is instead.
pub fn regular(kind: FileType) -> io::Result<()> {
    let what = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_symlink() => "a symbolic link",
        kind if kind.is_fifo() => "a FIFO",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(io::Error::new(ErrorKind::InvalidInput, format!("it is {what}, and must be a regular file")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType as Kind, Mode, mknodat};
    use std::os::unix::fs::symlink;

    #[test]
    fn only_regular_files_are_opened_and_nothing_is_waited_for() {
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
