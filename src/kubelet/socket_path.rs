//! What lies where another program's socket is expected.

use std::fs::{self, FileType, Metadata};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Why a path names no socket. Written after the path it makes a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoSocket {
    /// Nothing has that path.
    #[error("is not there")]
    Absent,
    /// A symbolic link has it, and its target is not there.
    #[error("is a symbolic link whose target is not there")]
    DanglingLink,
    /// Another kind of file has it, or is what the link there leads to.
    #[error("is {0}, not a socket")]
    Other(&'static str),
    /// The system does not say what has it.
    #[error("cannot be examined: {0}")]
    Unreadable(io::ErrorKind),
}

impl NoSocket {
    /// What to do about it, where the kubelet serves the socket.
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
/// What is there instead.
pub fn socket_metadata(path: &Path) -> Result<Metadata, NoSocket> {
    match fs::metadata(path) {
        Ok(about) if about.file_type().is_socket() => Ok(about),
        Ok(about) => Err(NoSocket::Other(kind(about.file_type()))),
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
    fn each_kind_of_file_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("folder")).unwrap();
        fs::write(at("file"), "").unwrap();
        mknodat(CWD, at("fifo"), Kind::Fifo, Mode::RUSR, 0).unwrap();
        symlink("nothing", at("dangling")).unwrap();
        symlink("loop", at("loop")).unwrap();
        for (name, sentence) in [
            ("absent", "is not there"),
            ("folder", "is a folder, not a socket"),
            ("file", "is a regular file, not a socket"),
            ("fifo", "is a named pipe (FIFO), not a socket"),
            ("dangling", "is a symbolic link whose target is not there"),
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
