//! Examines a path where another program's socket is expected, and explains why no connection can be made there.

use std::fs::{self, FileType, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
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
    pub fn advice(&self) -> String {
        match self {
            Self::Absent => {
                "start the kubelet; if it runs, `berth node check` finds its folders, which a pod has to mount".into()
            }
            Self::DanglingLink => {
                "start the kubelet; if it runs, mount the folder of the link's target, too".into()
            }
            Self::Other(_) => "remove it and restart the kubelet".into(),
            Self::Unreadable(io::ErrorKind::PermissionDenied) => permission_advice(),
            Self::Unreadable(_) => "check the path; `berth node check` examines it again".into(),
        }
    }
}

/// Why no connection to a socket can be made, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}; {fix}")]
pub struct NoConnection {
    /// Whether the system denies it to this process.
    pub is_denied: bool,
    /// The socket and the cause.
    pub what: String,
    /// The remedy.
    pub fix: String,
}

impl NoConnection {
    /// The failure of a connection to the kubelet's socket at `path`.
    #[must_use]
    pub fn new(path: &Path, error: &io::Error) -> Self {
        let is_denied = error.kind() == io::ErrorKind::PermissionDenied;
        let (cause, fix) = match (error.kind(), socket_metadata(path)) {
            (io::ErrorKind::PermissionDenied, Ok(metadata)) => {
                let (mode, owner) = (metadata.mode() & 0o777, metadata.uid());
                (
                    format!("refuses this process: {error}; it has mode {mode:04o} and owner uid {owner}"),
                    permission_advice(),
                )
            }
            (io::ErrorKind::PermissionDenied, Err(_)) => {
                (format!("cannot be reached: {error}"), permission_advice())
            }
            (io::ErrorKind::ConnectionRefused, _) => {
                let fix = "start the kubelet; if it runs, restart it, since the socket was left by an earlier kubelet \
                           process";
                (format!("exists, but no process answers: {error}"), fix.into())
            }
            (_, Err(no_socket)) => (no_socket.to_string(), no_socket.advice()),
            (_, Ok(_)) => (format!("does not answer: {error}"), "restart the kubelet".into()),
        };
        Self { is_denied, what: format!("{} {cause}", path.display()), fix }
    }

    /// The failure of a gRPC connection.
    pub(super) fn of_dial(path: &Path, error: &(dyn std::error::Error + 'static)) -> Self {
        Self::of_call(path, error).unwrap_or_else(|| {
            // A transport error's own message does not include its cause.
            let cause = std::iter::successors(Some(error), |cause| cause.source()).last();
            let what = format!("{}: {}", path.display(), cause.unwrap_or(error));
            Self { is_denied: false, what, fix: "restart the kubelet".into() }
        })
    }

    /// The failure of a gRPC call or of its connection; `None` if no error of the system caused it.
    pub(super) fn of_call(path: &Path, error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        let mut causes = std::iter::successors(Some(error), |cause| cause.source());
        causes.find_map(|cause| cause.downcast_ref()).map(|error| Self::new(path, error))
    }
}

/// The remedy where the system denies this process a permission.
#[must_use]
pub fn permission_advice() -> String {
    match rustix::process::geteuid() {
        root if root.is_root() => {
            "berth runs as root, so SELinux, AppArmor or a missing capability denies it: `dmesg` shows which"
                .into()
        }
        user => format!("berth runs as uid {}: run it as root (uid 0)", user.as_raw()),
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
        let inode = |name: &str| socket_metadata(&at(name)).unwrap().ino();
        assert_eq!(inode("link"), inode("socket"));
    }
    #[test]
    fn each_failure_of_a_connection_has_its_cause_and_a_remedy() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kubelet.sock");
        let failure = |kind: io::ErrorKind| NoConnection::new(&path, &kind.into());
        assert!(failure(io::ErrorKind::NotFound).what.ends_with("kubelet.sock does not exist"));
        let listener = UnixListener::bind(&path).unwrap();
        let denied = failure(io::ErrorKind::PermissionDenied);
        let uid = rustix::process::geteuid();
        assert!(denied.is_denied && denied.what.contains("permission denied"), "{denied}");
        assert!(denied.what.contains(&format!("owner uid {}", uid.as_raw())), "{denied}");
        let expected = if uid.is_root() { "runs as root" } else { "run it as root" };
        assert!(denied.fix.contains(expected), "{denied}");
        drop(listener);
        let refused = std::os::unix::net::UnixStream::connect(&path).unwrap_err();
        let refused = NoConnection::new(&path, &refused);
        assert!(refused.what.contains("no process answers: Connection refused"), "{refused}");
        assert!(refused.fix.contains("start the kubelet"), "{refused}");
    }
}
