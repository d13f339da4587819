//! Connections to Unix sockets, with a limit on the wait.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A full queue is tried again after this long.
const CONNECT_AGAIN: Duration = Duration::from_millis(10);

/// Connects, and waits no longer than `wait`: the queue of a process that listens and was stopped
/// (SIGSTOP) may be full for good.
///
/// # Errors
/// `TimedOut` if a process listens and accepts no connection; otherwise the error of the system.
pub fn connect_within(path: &Path, wait: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let end = Instant::now() + wait;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // On a Unix socket this is a full queue (connect(2)); nothing tells when it is not.
            Err(Errno::AGAIN) if Instant::now() < end => std::thread::sleep(CONNECT_AGAIN),
            Err(Errno::AGAIN) => return Err(ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
