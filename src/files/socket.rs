//! Connects to Unix sockets with a timeout.

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use std::io::{self, ErrorKind};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// Interval of attempts while the listener's queue is full.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Connects within `wait`: the queue of a listening process that is stopped (SIGSTOP) may stay full.
///
/// # Errors
/// `TimedOut` if a process listens but accepts no connection; otherwise the system's error.
pub fn connect_within(path: &Path, wait: Duration) -> io::Result<UnixStream> {
    let address = SocketAddrUnix::new(path)?;
    let socket = socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    let deadline = Instant::now() + wait;
    loop {
        match connect(&socket, &address) {
            Ok(()) => break,
            // A full queue (connect(2)); no event reports when it has room.
            Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(RETRY_INTERVAL),
            Err(Errno::AGAIN) => return Err(ErrorKind::TimedOut.into()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let stream = UnixStream::from(socket);
    stream.set_nonblocking(false)?;
    Ok(stream)
}
