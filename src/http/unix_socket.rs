//! The Unix socket for root of this node: a file that only its owner may connect to, with a peer that the kernel
//! identifies. It needs no token, which root could read anyway.

use crate::settings::AdminError;
use berth_files::socket::connect_within;
use std::fs::{DirBuilder, Permissions, remove_file, rename, set_permissions, symlink_metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Longest wait at the start for a process that may be listening already.
const LISTENS_WAIT: Duration = Duration::from_secs(1);

/// A listening socket.
pub(crate) struct AdminSocket {
    path: PathBuf,
    file: (u64, u64),
    listener: UnixListener,
}

/// The file of a socket; removed when this is dropped.
pub(crate) struct SocketFile {
    path: PathBuf,
    file: (u64, u64),
}

impl AdminSocket {
    /// Listens. The file of a daemon that has ended is replaced; one on which a process listens is not.
    ///
    /// # Errors
    /// If the path cannot be used; the error names the remedy.
    pub(crate) fn bind(path: &Path) -> Result<Self, AdminError> {
        let bad = |rule, source| AdminError::Socket { path: path.into(), rule, source };
        match symlink_metadata(path) {
            Ok(there) if !there.file_type().is_socket() => {
                return Err(bad(
                    "it is not a socket: remove it, or choose another with --admin-socket",
                    None,
                ));
            }
            Ok(_) => match connect_within(path, LISTENS_WAIT) {
                Ok(_) => {
                    return Err(bad(
                        "another daemon listens there: stop it, or choose another with --admin-socket",
                        None,
                    ));
                }
                // A stopped process (SIGSTOP) that will continue: its queue is full, and it listens.
                Err(error) if error.kind() == ErrorKind::TimedOut => {
                    return Err(bad(
                        "another process owns this socket and does not answer: end it, or choose another with --admin-socket",
                        Some(error),
                    ));
                }
                Err(_) => {}
            },
            Err(_) => {}
        }
        Self::put(path).map_err(|source| {
            let rule = match source.kind() {
                ErrorKind::InvalidInput => "its path is longer than the 103 bytes that it may have",
                ErrorKind::AlreadyExists => {
                    "there is another file at this path with the suffix .new: remove it"
                }
                _ => "it cannot be created; is its folder writable? (--admin-socket)",
            };
            bad(rule, Some(source))
        })
    }

    /// Created next to its path and moved there once its mode is set, so that it is never open for others. The peer
    /// is checked whatever the mode is.
    fn put(path: &Path) -> io::Result<Self> {
        if let Some(folder) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
            DirBuilder::new().recursive(true).mode(0o755).create(folder)?;
        }
        let draft = PathBuf::from(format!("{}.new", path.display()));
        // A killed daemon left it. Any other file is not the daemon's to remove, and is an error.
        if symlink_metadata(&draft).is_ok_and(|there| there.file_type().is_socket()) {
            remove_file(&draft)?;
        }
        let listener = UnixListener::bind(&draft).map_err(|error| match error.kind() {
            ErrorKind::AddrInUse => ErrorKind::AlreadyExists.into(),
            _ => error,
        })?;
        set_permissions(&draft, Permissions::from_mode(0o600))?;
        rename(&draft, path)?;
        // The HTTP library requires it.
        listener.set_nonblocking(true)?;
        let about = symlink_metadata(path)?;
        Ok(Self { path: path.into(), file: (about.dev(), about.ino()), listener })
    }

    /// The listener, and the guard of its file.
    pub(crate) fn split(self) -> (UnixListener, SocketFile) {
        (self.listener, SocketFile { path: self.path, file: self.file })
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        // Another daemon may have replaced the file meanwhile.
        let ours = symlink_metadata(&self.path).is_ok_and(|a| (a.dev(), a.ino()) == self.file);
        if ours {
            let _ = remove_file(&self.path);
        }
    }
}

/// The name of a user who needs no token: root, or the daemon's own user, who can read the token file. `None`: the
/// user needs one.
pub(crate) fn trusted(uid: u32, own: u32) -> Option<String> {
    match uid {
        0 => Some("root".into()),
        uid if uid == own => Some(format!("user-{uid}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, socket_with};
    use std::os::unix::net::UnixStream;

    #[test]
    fn only_root_and_the_daemons_own_user_need_no_token() {
        assert_eq!(trusted(0, 0).as_deref(), Some("root"));
        assert_eq!(trusted(0, 1000).as_deref(), Some("root"));
        assert_eq!(trusted(1000, 1000).as_deref(), Some("user-1000"));
        // No other user, and no user of another user namespace, which the kernel shows as 65534.
        for uid in [1, 1001, 65534, u32::MAX] {
            assert_eq!(trusted(uid, 1000), None);
            assert_eq!(trusted(uid, 0), None);
        }
    }

    #[test]
    fn a_dead_daemons_socket_is_replaced_and_a_living_ones_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run/admin.sock");
        let first = AdminSocket::bind(&path).unwrap();
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert!(matches!(AdminSocket::bind(&path), Err(AdminError::Socket { .. })));
        drop(first);
        assert!(path.exists(), "as after a kill");
        let (listener, file) = AdminSocket::bind(&path).unwrap().split();
        assert!(UnixStream::connect(&path).is_ok());
        drop(listener);
        // The next daemon starts before this one has ended.
        let (next, next_file) = AdminSocket::bind(&path).unwrap().split();
        drop(file);
        assert!(UnixStream::connect(&path).is_ok());
        drop((next, next_file));
        assert!(!path.exists());
        std::fs::write(&path, "not a socket").unwrap();
        assert!(AdminSocket::bind(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "not a socket");
        let long = dir.path().join("x".repeat(120));
        let text = AdminSocket::bind(&long).err().unwrap().to_string();
        assert!(text.contains("103 bytes"), "{text}");
        // A path of the documented length is not too long.
        let folder = dir.path().as_os_str().len() + 1;
        assert!(AdminSocket::bind(&dir.path().join("y".repeat(104 - folder))).is_err());
        drop(AdminSocket::bind(&dir.path().join("y".repeat(103 - folder))).unwrap());
    }

    #[test]
    fn only_a_socket_that_is_in_the_way_of_the_draft_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let (path, draft) = (dir.path().join("admin.sock"), dir.path().join("admin.sock.new"));
        drop(UnixListener::bind(&draft).unwrap());
        drop(AdminSocket::bind(&path).unwrap());
        std::fs::write(&draft, "another file").unwrap();
        let error = AdminSocket::bind(&path).err().unwrap();
        assert!(error.to_string().contains(".new"), "{error}");
        assert_eq!(std::fs::read_to_string(&draft).unwrap(), "another file");
    }

    #[test]
    fn a_stopped_process_that_listens_does_not_block_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("admin.sock");
        // No process accepts, as with a stopped daemon; the queue has room for one.
        let socket =
            socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        rustix::net::listen(&socket, 0).unwrap();
        let short = Duration::from_millis(20);
        let mut waiting = Vec::new();
        let full = loop {
            match connect_within(&path, short) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
            assert!(waiting.len() < 10, "the queue takes everybody");
        };
        assert_eq!(full.kind(), ErrorKind::TimedOut);
        let text = AdminSocket::bind(&path).err().unwrap().to_string();
        assert!(text.contains("does not answer"), "{text}");
        drop(socket);
        assert_eq!(connect_within(&path, short).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    }
}
