//! A connection below HTTP and TLS: it has a slot, ends when that is closed, and reads nothing while the client does
//! not read its responses.
//!
//! Without the last, a client could send requests without end: the HTTP library would keep them, and responses
//! without a body, in memory. So it gets about one request at a time.

use crate::certificate::ClientCertificate;
use crate::connection_slots::{ConnectionSlots, Slot, SlotGuard};
use crate::peer::Peer;
use crate::rate_limit::Client;
use actix_tls::accept::rustls_0_23::TlsStream;
use actix_web::dev::Extensions;
use actix_web::rt::net::{ActixStream, Ready, TcpStream, UnixStream};
use std::io::{self, ErrorKind, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Bytes of heads that are read at once. A request has at least 18 bytes, and some 400 in memory, or 35 and 2,000
/// with a header: at most 0.3 MiB for a connection.
const HEADS_AT_ONCE: usize = 4 * 1024;

/// A connection with a slot.
pub(crate) struct Connection<Io> {
    io: Io,
    taken: SlotGuard,
    /// Whether the last write is pending.
    full: bool,
    /// Whether a read was requested meanwhile.
    reads: bool,
    /// Bytes of heads that were read without a pause.
    heads: usize,
}

impl Connection<TcpStream> {
    /// An accepted TCP connection, once it has a slot. A service, which never fails.
    pub(crate) async fn tcp(io: TcpStream, slots: Arc<ConnectionSlots>) -> Result<Self, ()> {
        // Responses are written whole, so Nagle's algorithm would only delay them.
        let _ = io.set_nodelay(true);
        let client = io.peer_addr().map_or(Client::Others, |from| Client::at(from.ip()));
        Ok(Self::new(io, slots.take(client).await))
    }
}

impl Connection<UnixStream> {
    /// An accepted connection of the Unix socket, once it has a slot.
    pub(crate) async fn unix(io: UnixStream, slots: Arc<ConnectionSlots>) -> Result<Self, ()> {
        let client = io.peer_cred().map_or(Client::Others, |peer| Client::User(peer.uid()));
        Ok(Self::new(io, slots.take(client).await))
    }
}

impl<Io> Connection<Io> {
    fn new(io: Io, taken: SlotGuard) -> Self {
        Self { io, taken, full: false, reads: false, heads: 0 }
    }

    fn slot(&self) -> &Arc<Slot> {
        &self.taken.slot
    }

    fn check(&self, cx: &Context<'_>) -> io::Result<()> {
        match self.slot().is_closed(cx.waker()) {
            true => Err(io::Error::new(ErrorKind::ConnectionAborted, "the connection's slot was needed")),
            false => Ok(()),
        }
    }

    fn wrote(&mut self, cx: &Context<'_>, wrote: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.full = wrote.is_pending();
        self.slot().set_reading(!self.full);
        if !self.full && std::mem::take(&mut self.reads) {
            // The pending read has no other waker.
            cx.waker().wake_by_ref();
        }
        wrote
    }
}

impl<Io: AsyncRead + Unpin> AsyncRead for Connection<Io> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check(cx)?;
        self.slot().mark_read();
        if self.full {
            self.reads = true;
            return Poll::Pending;
        }
        if self.slot().is_reading_paused() {
            return Poll::Pending;
        }
        if self.slot().is_handling() {
            // A body, which its handler reads in pieces.
            return Pin::new(&mut self.io).poll_read(cx, buffer);
        }
        let room = (HEADS_AT_ONCE - self.heads).min(buffer.remaining());
        if self.heads == HEADS_AT_ONCE {
            self.heads = 0;
            // Read on as soon as the library has parsed these bytes.
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

impl<Io: AsyncWrite + Unpin> AsyncWrite for Connection<Io> {
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

impl<Io: ActixStream> ActixStream for Connection<Io> {
    fn poll_read_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        self.io.poll_read_ready(cx)
    }

    fn poll_write_ready(&self, cx: &mut Context<'_>) -> Poll<io::Result<Ready>> {
        self.io.poll_write_ready(cx)
    }
}

/// A transport, whose requests find its slot and its peer in the data of their connection.
pub(crate) trait Transport {
    /// The slot, and the peer unless it has disconnected already.
    fn ends(&self) -> (&Arc<Slot>, Option<Peer>);
}

impl Transport for Connection<TcpStream> {
    fn ends(&self) -> (&Arc<Slot>, Option<Peer>) {
        (self.slot(), self.io.peer_addr().ok().map(Peer::Tcp))
    }
}

impl Transport for TlsStream<Connection<TcpStream>> {
    fn ends(&self) -> (&Arc<Slot>, Option<Peer>) {
        let (connection, session) = self.get_ref();
        let certificate = session.peer_certificates().and_then(ClientCertificate::of);
        let peer = connection.io.peer_addr().ok().map(|from| Peer::Tls { from, certificate });
        (connection.slot(), peer)
    }
}

impl Transport for Connection<UnixStream> {
    fn ends(&self) -> (&Arc<Slot>, Option<Peer>) {
        let peer = self.io.peer_cred().ok();
        (self.slot(), peer.map(|peer| Peer::Unix { uid: peer.uid(), pid: peer.pid() }))
    }
}

/// Adds both. Without a known peer none is added, and the request is unauthenticated.
pub(crate) fn note(transport: &impl Transport, data: &mut Extensions) {
    let (slot, peer) = transport.ends();
    data.insert(Arc::clone(slot));
    if let Some(peer) = peer {
        data.insert(peer);
    }
}
