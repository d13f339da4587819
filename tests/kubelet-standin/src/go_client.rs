//! Lets clients in Go call a server in Rust on a unix socket.
//!
//! grpc-go sends the escaped path of the socket as `:authority`. That is no authority: the kubelet's server, Go
//! itself, accepts it, and the `h2` library resets the stream. So a client's frames are read here, and the value is
//! replaced by the one that the kubelet's own client sends.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tonic::transport::server::Connected;

const PREFACE_BYTES: usize = 24;
/// RFC 9113, section 4.1.
const FRAME_HEAD_BYTES: usize = 9;
const TYPE_HEADERS: u8 = 1;
/// PADDED and PRIORITY, which grpc-go does not use: such a frame is passed on as it is.
const FLAGS_WITH_PREFIX: u8 = 0x8 | 0x20;
/// Of `:authority` in the static table of RFC 7541.
const AUTHORITY_INDEX: usize = 1;
const AUTHORITY: &[u8] = b"localhost";
/// Read at once.
const CHUNK_BYTES: usize = 16 * 1024;

/// A server's connection whose client may be a Go program.
pub(crate) struct GoClient<S> {
    stream: S,
    /// Received: the start of a frame whose end is still missing.
    received: Vec<u8>,
    /// For the server.
    ready: Vec<u8>,
    has_preface: bool,
}

impl<S> GoClient<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, received: Vec::new(), ready: Vec::new(), has_preface: false }
    }

    /// Moves whole frames from `received` to `ready`.
    fn pass_frames(&mut self) {
        let mut at = 0;
        if !self.has_preface && self.received.len() >= PREFACE_BYTES {
            self.has_preface = true;
            at = PREFACE_BYTES;
            self.ready.extend_from_slice(&self.received[..at]);
        }
        while self.has_preface
            && let Some(frame) = frame(&self.received[at..])
        {
            at += frame.len();
            let (head, body) = frame.split_at(FRAME_HEAD_BYTES);
            if head[3] == TYPE_HEADERS && head[4] & FLAGS_WITH_PREFIX == 0 {
                let body = with_authority(body).unwrap_or_else(|| body.to_vec());
                // A block of headers is far below the 24 bits of a length.
                let length = u32::try_from(body.len()).unwrap_or(u32::MAX).to_be_bytes();
                self.ready.extend_from_slice(&length[1..]);
                self.ready.extend_from_slice(&head[3..]);
                self.ready.extend_from_slice(&body);
            } else {
                self.ready.extend_from_slice(frame);
            }
        }
        self.received.drain(..at);
    }
}

/// The first frame, with its head; `None` if its end is missing.
fn frame(bytes: &[u8]) -> Option<&[u8]> {
    let head = bytes.get(..FRAME_HEAD_BYTES)?;
    let length = head[..3].iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    bytes.get(..FRAME_HEAD_BYTES + length)
}

/// A block of headers (RFC 7541, section 6) with another `:authority`; `None` if it has no literal one.
fn with_authority(block: &[u8]) -> Option<Vec<u8>> {
    let mut at = 0;
    loop {
        let first = *block.get(at)?;
        // An index of a whole field; a new size of the table.
        if first & 0x80 != 0 || first & 0xe0 == 0x20 {
            let bits = if first & 0x80 != 0 { 7 } else { 5 };
            at = integer(block, at, bits)?.1;
            continue;
        }
        let (name, after) = integer(block, at, if first & 0x40 != 0 { 6 } else { 4 })?;
        let value = if name == 0 { string_end(block, after)? } else { after };
        let end = string_end(block, value)?;
        if name == AUTHORITY_INDEX {
            let length = u8::try_from(AUTHORITY.len()).ok()?;
            return Some([&block[..value], &[length], AUTHORITY, block.get(end..)?].concat());
        }
        at = end;
    }
}

/// RFC 7541, section 5.1: the number in the lowest bits of the byte at `at`, and where it ends.
fn integer(block: &[u8], mut at: usize, bits: u32) -> Option<(usize, usize)> {
    let limit = (1_usize << bits) - 1;
    let mut value = usize::from(*block.get(at)?) & limit;
    at += 1;
    if value < limit {
        return Some((value, at));
    }
    let mut shift = 0;
    loop {
        let byte = usize::from(*block.get(at)?);
        at += 1;
        value = value.checked_add((byte & 0x7f).checked_shl(shift)?)?;
        shift += 7;
        if byte & 0x80 == 0 {
            return Some((value, at));
        }
    }
}

fn string_end(block: &[u8], at: usize) -> Option<usize> {
    let (length, at) = integer(block, at, 7)?;
    at.checked_add(length)
}

impl<S: AsyncRead + Unpin> AsyncRead for GoClient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        while self.ready.is_empty() {
            let mut chunk = [0; CHUNK_BYTES];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut self.stream).poll_read(context, &mut read))?;
            if read.filled().is_empty() {
                // The end. A frame that was cut off is no use to the server.
                return Poll::Ready(Ok(()));
            }
            self.received.extend_from_slice(read.filled());
            self.pass_frames();
        }
        let count = self.ready.len().min(buffer.remaining());
        buffer.put_slice(&self.ready[..count]);
        self.ready.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for GoClient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl<S> Connected for GoClient<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

#[cfg(test)]
mod tests {
    use super::{GoClient, PREFACE_BYTES, with_authority};
    use tokio::io::AsyncReadExt as _;

    /// `:method: POST` by index, `:authority` as a literal that joins the table, and a field with a new name.
    fn block(authority: &[u8]) -> Vec<u8> {
        let length = [u8::try_from(authority.len()).unwrap()];
        [b"\x83\x41".as_slice(), &length, authority, b"\x40\x02te\x08trailers"].concat()
    }

    #[test]
    fn the_path_of_a_socket_is_replaced_and_other_fields_are_kept() {
        let path = b"%2Fvar%2Flib%2Fkubelet%2Fdevice-plugins%2Fkubelet.sock";
        assert_eq!(with_authority(&block(path)), Some(block(b"localhost")));
        // A long value has a length of two bytes.
        let long = [b"\x83\x41\x7f\x80\x01".as_slice(), &[b'a'; 255], b"\x84"].concat();
        assert_eq!(with_authority(&long), Some(b"\x83\x41\x09localhost\x84".to_vec()));
        assert_eq!(with_authority(b"\x83\x84"), None, "no authority");
        assert_eq!(with_authority(b"\x83\x41\x20short"), None, "cut off");
    }

    #[tokio::test]
    async fn frames_arrive_whole_whatever_the_pieces_in_which_they_were_sent() {
        let frame = |kind: u8, body: &[u8]| {
            let length = u8::try_from(body.len()).unwrap();
            [&[0, 0, length, kind, 0, 0, 0, 0, 1], body].concat()
        };
        let sent = move |authority: &[u8]| {
            let data = frame(0, b"data");
            [&[b'P'; PREFACE_BYTES], &*frame(1, &block(authority)), &*data].concat()
        };
        let (client, server) = tokio::io::duplex(1);
        let sending = tokio::spawn(async move {
            let mut client = client;
            tokio::io::AsyncWriteExt::write_all(&mut client, &sent(b"%2Frun%2Fa.sock")).await.unwrap();
        });
        let mut received = Vec::new();
        GoClient::new(server).read_to_end(&mut received).await.unwrap();
        sending.await.unwrap();
        assert_eq!(received, sent(b"localhost"));
    }
}
