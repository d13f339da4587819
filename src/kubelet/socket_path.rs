//! Examines a path where another program's socket is expected.

use std::fs::{self, FileType, Metadata};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Why a path names no socket. Its text completes a sentence that starts with the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSocket {
    /// The path does not exist.
    #[error("does not exist")]
    Absent,
    /// The path is a symbolic link whose target does not exist.
    #[error("is a symbolic link whose target does not exist")]
    DanglingLink,
    /// The path, or the target of a symbolic link there, is a file of another kind.
    #[error("is {0}, not a socket")]
    Other(&'static str),
    /// The path cannot be examined.
    #[error("cannot be examined: {0}")]
    Unreadable(io::ErrorKind),
}

impl NoSocket {
    /// How to fix a missing kubelet socket.
    #[must_use]
    pub fn advice(&self) -> &'static str {
        match self {
            Self::Absent => {
                "start the kubelet; if it runs, check --kubelet-dir and that the folder is mounted"
            }
            Self::DanglingLink => "start the kubelet; if it runs, mount the folder of the link's target, too",
            Self::Other(_) => "remove it and restart the kubelet",
            Self::Unreadable(_) => "check the permissions of the path, and run berth as root",
        }
    }
}

/// The metadata of the socket at `path`. Symbolic links are followed.
///
/// # Errors
/// Why the path names no socket.
pub fn socket_metadata(path: &Path) -> Result<Metadata, NoSocket> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.file_type().is_socket() => Ok(metadata),
        Ok(metadata) => Err(NoSocket::Other(kind(metadata.file_type()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let is_link = fs::symlink_metadata(path).is_ok();
            Err(if is_link { NoSocket::DanglingLink } else { NoSocket::Absent })
        }
        Err(error) => Err(NoSocket::Unreadable(error.kind())),
    }
}

fn kind(file: FileType) -> &'static str {
    match file {
        _ if file.is_dir() => "a folder",
        _ if file.is_file() => "a regular file",
        _ if file.is_fifo() => "a named pipe (FIFO)",
        _ => "a device",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{CWD, FileType as Kind, Mode, mknodat};
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    #[test]
    fn each_kind_of_file_is_described() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        fs::write(at("file"), "").unwrap();
        mknodat(CWD, at("fifo"), Kind::Fifo, Mode::RUSR, 0).unwrap();
        symlink("nothing", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for (name, sentence) in [
            ("absent", "does not exist"),
            ("folder", "is a folder, not a socket"),
            ("file", "is a regular file, not a socket"),
            ("fifo", "is a named pipe (FIFO), not a socket"),
            ("dangling", "is a symbolic link whose target does not exist"),
            ("/dev/null", "is a device, not a socket"),
        ] {
            assert_eq!(socket_metadata(&at(name)).unwrap_err().to_string(), sentence);
        }
        assert!(matches!(socket_metadata(&at("loop")), Err(NoSocket::Unreadable(_))));
        let _listener = UnixListener::bind(at("socket")).unwrap();
        symlink("socket", at("link")).unwrap();
        use std::os::unix::fs::MetadataExt;
        let inode = |name: &str| socket_metadata(&at(name)).unwrap().ino();
        assert_eq!(inode("link"), inode("socket"));
    }
}
