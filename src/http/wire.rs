//! A connection below HTTP and TLS: it has a slot, ends when that is taken away, and takes nothing in while
//! the other end leaves lying what was sent to it.
//!
//! The last is against requests without end, one behind the other: the HTTP library would take them in, and
//! put answers that have no body, into memory without end. So it is given one at a time, or nearly so.

use super::connection_slots::{ConnectionSlots, Taken};
use super::peer::Peer;
use super::rate_limit::Client;
use super::slot::Slot;
use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::{ActixStream, Ready, TcpStream, UnixStream};
use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of heads that are read before they are looked at. A request has at least 18 bytes, and some 400 in
/// memory, or 35 and 2,000 with a header: at most 0.3 MiB a connection.
const HEADS_AT_ONCE: usize = 4 * 1024;

/// A connection with a slot.
pub(super) struct Wire<Io> {
    io: Io,
    taken: Taken,
    /// What was last written has no room yet.
    full: bool,
    /// Something was to be read meanwhile.
    reads: bool,
    /// Bytes of heads that were read at a stretch.
    heads: usize,
}

impl Wire<TcpStream> {
    /// A connection over TCP that was accepted just now, once there is a slot for it.
    pub(super) async fn tcp(io: TcpStream, slots: &Arc<ConnectionSlots>) -> Self {
        // Answers are written whole: nothing is won by waiting for more.
        let _ = io.set_nodelay(true);
        let client = io.peer_addr().map_or(Client::Others, |from| Client::at(from.ip()));
        Self::new(io, slots.take(client).await)
    }
}

impl Wire<UnixStream> {
    /// The same over a Unix socket.
    pub(super) async fn unix(io: UnixStream, slots: &Arc<ConnectionSlots>) -> Self {
        let client = io.peer_cred().map_or(Client::Others, |peer| Client::User(peer.uid()));
        Self::new(io, slots.take(client).await)
    }
}

impl<Io> Wire<Io> {
    fn new(io: Io, taken: Taken) -> Self {
        Self { io, taken, full: false, reads: false, heads: 0 }
    }

    /// What is below.
    pub(super) fn get_ref(&self) -> &Io {
        &self.io
    }

    fn slot(&self) -> &Arc<Slot> {
        &self.taken.slot
    }

    fn check(&self, cx: &Context<'_>) -> io::Result<()> {
        match self.slot().is_closed(cx.waker()) {
            true => Err(io::Error::new(ErrorKind::ConnectionAborted, "the connection's place was needed")),
            false => Ok(()),
        }
    }

    fn wrote(&mut self, cx: &Context<'_>, wrote: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.full = wrote.is_pending();
        self.slot().takes(!self.full);
        if !self.full && std::mem::take(&mut self.reads) {
            // Whoever wanted to read was told to wait, and nothing but this wakes them.
            cx.waker().wake_by_ref();
        }
        wrote
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Wire<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        self.slot().hear();
        if self.full {
            self.reads = true;
            return Poll::Pending;
        }
        if self.slot().is_hushed() {
            return Poll::Pending;
        }
        if self.slot().is_at_work() {
            // A body, which its handler takes piece by piece.
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let room = (HEADS_AT_ONCE - self.heads).min(buffer.remaining());
        if self.heads == HEADS_AT_ONCE {
            self.heads = 0;
            // At once again, when what came has been looked at.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut part = ReadBuf::new(buffer.initialize_unfilled_to(room));
        let read = Pin::new(&mut self.io).poll_read(cx, &mut part);
        let came = part.filled().len();
        buffer.advance(came);
        self.heads = if read.is_ready() { self.heads + came } else { 0 };
        read
    }
}

impl<Io: AsyncWrite + Unpin> AsyncWrite for Wire<Io> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        let wrote = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.wrote(cx, wrote)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.check(cx)?;
        let wrote = Pin::new(&mut self.io).poll_write_vectored(cx, pieces);
        self.wrote(cx, wrote)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check(cx)?;
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<Io: ActixStream> ActixStream for Wire<Io> {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        self.io.poll_read_ready(cx)
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        self.io.poll_write_ready(cx)
    }
}

/// What requests find beside their connection: its slot and who is at the other end.
pub(super) trait Ends {
    fn slot(&self) -> &Arc<Slot>;
    fn peer(&self) -> Option<Peer>;
}

impl Ends for Wire<TcpStream> {
    fn slot(&self) -> &Arc<Slot> {
        &self.taken.slot
    }

    fn peer(&self) -> Option<Peer> {
        Peer::tcp(&self.io)
    }
}

impl Ends for TlsStream<Wire<TcpStream>> {
    fn slot(&self) -> &Arc<Slot> {
        &self.get_ref().0.taken.slot
    }

    fn peer(&self) -> Option<Peer> {
        let (wire, session) = self.get_ref();
        Peer::tls(wire.get_ref(), session.peer_certificates())
    }
}

impl Ends for Wire<UnixStream> {
    fn slot(&self) -> &Arc<Slot> {
        &self.taken.slot
    }

    fn peer(&self) -> Option<Peer> {
        Peer::unix(&self.io)
    }
}

/// Takes down both. A peer who cannot be told is not taken down, and opens nothing.
pub(super) fn note(ends: &impl Ends, data: &mut Extensions) {
    data.insert(Arc::clone(ends.slot()));
    if let Some(peer) = ends.peer() {
        data.insert(peer);
    }
}
