//! The bytes of an NRI socket as messages, and back. Two connections share the socket, each of which carries ttrpc.
//!
//! Sources: containerd/nri 0.12 `pkg/net/multiplex/mux.go` (frames of the multiplexer), containerd/ttrpc `channel.go`
//! (frames of ttrpc). A message may arrive in pieces of any size, and a frame of the multiplexer may hold the end of one
//! message and the beginning of the next.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// The longest payload of a ttrpc message, bytes; upstream's limit.
pub(crate) const PAYLOAD_BYTES_MAX: usize = 4 << 20;
/// Connection number and payload length, both big-endian.
const TRUNK_HEADER_BYTES: usize = 8;
/// Payload length, stream, type and flags; the numbers are big-endian.
const MESSAGE_HEADER_BYTES: usize = 10;
/// The longest payload of a frame that is sent, bytes. The runtime reads a connection through a buffer of this size, and
/// drops it if a frame is longer (`conn.Read` in mux.go).
const SENT_FRAME_BYTES_MAX: usize = 4096;

/// One of the two connections that share the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Channel {
    /// The runtime calls the plugin.
    Plugin,
    /// The plugin calls the runtime.
    Runtime,
}

impl Channel {
    fn number(self) -> u32 {
        match self {
            Self::Plugin => 1,
            Self::Runtime => 2,
        }
    }

    fn of(number: u32) -> Option<Self> {
        [Self::Plugin, Self::Runtime].into_iter().find(|channel| channel.number() == number)
    }
}

/// The type of a ttrpc message; streaming calls have a third one, which NRI does not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Request,
    Response,
}

impl Kind {
    fn number(self) -> u8 {
        match self {
            Self::Request => 1,
            Self::Response => 2,
        }
    }
}

/// A message of ttrpc.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub(crate) channel: Channel,
    /// The number of the call; the caller's numbers are odd.
    pub(crate) stream: u32,
    pub(crate) kind: Kind,
    pub(crate) payload: Bytes,
}

/// Why bytes are no message. The connection cannot be used after it, since the beginning of the next message is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The runtime announces, or Berth would send, a longer message than ttrpc allows.
    #[error("a message of {bytes} bytes; ttrpc allows at most {PAYLOAD_BYTES_MAX}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// A frame of the multiplexer that is longer than a message.
    #[error("a frame of {bytes} bytes; a message has at most {}", MESSAGE_HEADER_BYTES + PAYLOAD_BYTES_MAX)]
    TrunkTooLong {
        /// Its length.
        bytes: usize,
    },
    /// A message of another type than request and response.
    #[error("a message of type {kind}; NRI uses requests (1) and responses (2)")]
    UnknownKind {
        /// The type.
        kind: u8,
    },
}

impl Message {
    /// The bytes to send.
    ///
    /// # Errors
    /// If the payload is too long.
    pub(crate) fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let bytes = self.payload.len();
        let too_long = |_| FrameError::TooLong { bytes };
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLong { bytes });
        }
        let mut message = Vec::with_capacity(MESSAGE_HEADER_BYTES + bytes);
        message.put_u32(u32::try_from(bytes).map_err(too_long)?);
        message.put_u32(self.stream);
        message.put_slice(&[self.kind.number(), 0]);
        message.put_slice(&self.payload);
        let mut sent = Vec::with_capacity(message.len() + TRUNK_HEADER_BYTES);
        for piece in message.chunks(SENT_FRAME_BYTES_MAX) {
            sent.put_u32(self.channel.number());
            sent.put_u32(u32::try_from(piece.len()).map_err(too_long)?);
            sent.put_slice(piece);
        }
        Ok(sent)
    }
}

/// Reads messages from the pieces in which they arrive.
///
/// It holds what was pushed and is not read yet, and for each channel at most one incomplete message and one frame: at
/// most 16 MiB.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// What was pushed and belongs to no channel yet.
    received: BytesMut,
    /// The frame of the multiplexer that is being read.
    frame: Option<Frame>,
    plugin: BytesMut,
    runtime: BytesMut,
}

#[derive(Debug)]
struct Frame {
    /// `None`: a connection that is not ours. Upstream's reader passes over those, too.
    channel: Option<Channel>,
    /// The bytes of its payload that are not read yet.
    left: usize,
}

impl Decoder {
    /// Adds what was received.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// The next complete message.
    ///
    /// # Errors
    /// If the bytes are no message; no later bytes can be read either.
    pub(crate) fn next(&mut self) -> Result<Option<Message>, FrameError> {
        loop {
            for channel in [Channel::Plugin, Channel::Runtime] {
                if let Some(message) = self.take_message(channel)? {
                    return Ok(Some(message));
                }
            }
            if !self.distribute()? {
                return Ok(None);
            }
        }
    }

    /// Reads the header of a frame, or moves received bytes of its payload to their channel. False if more have to be
    /// received first.
    fn distribute(&mut self) -> Result<bool, FrameError> {
        let Some(frame) = &mut self.frame else {
            if self.received.len() < TRUNK_HEADER_BYTES {
                return Ok(false);
            }
            let channel = Channel::of(self.received.get_u32());
            let left = usize_of(self.received.get_u32());
            if left > MESSAGE_HEADER_BYTES + PAYLOAD_BYTES_MAX {
                return Err(FrameError::TrunkTooLong { bytes: left });
            }
            self.frame = Some(Frame { channel, left });
            return Ok(true);
        };
        let piece = self.received.split_to(frame.left.min(self.received.len()));
        frame.left -= piece.len();
        let has_moved = !piece.is_empty() || frame.left == 0;
        match frame.channel {
            Some(Channel::Plugin) => self.plugin.unsplit(piece),
            Some(Channel::Runtime) => self.runtime.unsplit(piece),
            None => (),
        }
        if frame.left == 0 {
            self.frame = None;
        }
        Ok(has_moved)
    }

    /// Takes the message at the beginning of a channel's bytes, if all of it is there.
    fn take_message(&mut self, channel: Channel) -> Result<Option<Message>, FrameError> {
        let buffer = match channel {
            Channel::Plugin => &mut self.plugin,
            Channel::Runtime => &mut self.runtime,
        };
        if buffer.len() < MESSAGE_HEADER_BYTES {
            return Ok(None);
        }
        let mut header = &buffer[..MESSAGE_HEADER_BYTES];
        let (bytes, stream, kind) = (usize_of(header.get_u32()), header.get_u32(), header.get_u8());
        if bytes > PAYLOAD_BYTES_MAX {
            return Err(FrameError::TooLong { bytes });
        }
        let kind = match kind {
            1 => Kind::Request,
            2 => Kind::Response,
            kind => return Err(FrameError::UnknownKind { kind }),
        };
        if buffer.len() < MESSAGE_HEADER_BYTES + bytes {
            return Ok(None);
        }
        buffer.advance(MESSAGE_HEADER_BYTES);
        let payload = buffer.split_to(bytes).freeze();
        Ok(Some(Message { channel, stream, kind, payload }))
    }
}

/// A length of the wire; one that does not fit is above every limit.
fn usize_of(length: u32) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(channel: Channel, stream: u32, payload: Vec<u8>) -> Message {
        Message { channel, stream, kind: Kind::Request, payload: payload.into() }
    }

    /// All messages in these bytes, which arrive in pieces of this size.
    fn decoded(bytes: &[u8], piece: usize) -> Vec<Message> {
        let (mut decoder, mut found) = (Decoder::default(), Vec::new());
        for piece in bytes.chunks(piece) {
            decoder.push(piece);
            while let Some(message) = decoder.next().unwrap() {
                found.push(message);
            }
        }
        found
    }

    /// A frame of the multiplexer.
    fn trunk(connection: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap();
        [&connection.to_be_bytes()[..], &length.to_be_bytes(), payload].concat()
    }

    #[test]
    fn the_bytes_are_those_of_upstream() {
        // A request on connection 1, stream 3: the frame's header, then that of ttrpc.
        let sent = message(Channel::Plugin, 3, b"ab".to_vec()).encode().unwrap();
        assert_eq!(sent, [0, 0, 0, 1, 0, 0, 0, 12, 0, 0, 0, 2, 0, 0, 0, 3, 1, 0, b'a', b'b']);
    }

    #[test]
    fn no_frame_is_longer_than_the_buffer_of_the_runtime() {
        let whole = message(Channel::Runtime, 1, vec![7; 3 * SENT_FRAME_BYTES_MAX]);
        let sent = whole.encode().unwrap();
        let (mut rest, mut frames) = (&sent[..], 0);
        while let Some((header, payload)) = rest.split_first_chunk::<TRUNK_HEADER_BYTES>() {
            let length = u32::from_be_bytes(header[4..].try_into().unwrap()) as usize;
            assert!(header[..4] == [0, 0, 0, 2] && length <= SENT_FRAME_BYTES_MAX, "{header:?}");
            (rest, frames) = (&payload[length..], frames + 1);
        }
        assert_eq!(frames, 4, "three and the headers' rest");
        assert_eq!(decoded(&sent, sent.len()), [whole]);
    }

    #[test]
    fn the_longest_message_arrives_and_a_longer_one_is_an_error() {
        let longest = message(Channel::Plugin, 1, vec![1; PAYLOAD_BYTES_MAX]);
        let sent = longest.encode().unwrap();
        assert!(decoded(&sent, 1 << 16) == [longest]);
        let bytes = PAYLOAD_BYTES_MAX + 1;
        let longer = message(Channel::Plugin, 1, vec![1; bytes]);
        assert_eq!(longer.encode(), Err(FrameError::TooLong { bytes }));
        let mut decoder = Decoder::default();
        let length = u32::try_from(bytes).unwrap().to_be_bytes();
        decoder.push(&trunk(1, &[&length[..], &[0, 0, 0, 1, 1, 0]].concat()));
        assert_eq!(decoder.next(), Err(FrameError::TooLong { bytes }));
        let mut decoder = Decoder::default();
        decoder.push(&[0, 0, 0, 1, 0xff, 0xff, 0xff, 0xff]);
        assert!(matches!(decoder.next(), Err(FrameError::TrunkTooLong { .. })));
    }

    #[test]
    fn frames_of_other_connections_are_passed_over_and_empty_ones_are_harmless() {
        let ours = message(Channel::Plugin, 5, b"x".to_vec());
        let bytes = [trunk(9, b"other"), trunk(1, b""), ours.encode().unwrap(), trunk(0, &[])].concat();
        assert_eq!(decoded(&bytes, 1), [ours]);
    }

    #[test]
    fn a_message_is_read_before_the_rest_of_its_frame_arrives() {
        let messages = [b"first", b"other"].map(|payload| message(Channel::Plugin, 1, payload.to_vec()));
        let sent = messages.each_ref().map(|message| message.encode().unwrap());
        let both = trunk(1, &[&sent[0][TRUNK_HEADER_BYTES..], &sent[1][TRUNK_HEADER_BYTES..]].concat());
        let (begin, rest) = both.split_at(sent[0].len() + 1);
        let mut decoder = Decoder::default();
        decoder.push(begin);
        assert_eq!(decoder.next(), Ok(Some(messages[0].clone())));
        assert_eq!(decoder.next(), Ok(None));
        decoder.push(rest);
        assert_eq!(decoder.next(), Ok(Some(messages[1].clone())));
    }

    #[test]
    fn a_message_of_another_type_is_an_error() {
        let mut decoder = Decoder::default();
        decoder.push(&trunk(1, &[0, 0, 0, 0, 0, 0, 0, 1, 3, 0]));
        assert_eq!(decoder.next(), Err(FrameError::UnknownKind { kind: 3 }));
    }

    proptest! {
        #[test]
        fn messages_are_the_same_however_they_are_cut(
            sent in prop::collection::vec((any::<bool>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..6000)), 1..6),
            piece in 1_usize..9000,
        ) {
            let messages: Vec<_> = sent.into_iter().map(|(plugin, stream, payload)| {
                message(if plugin { Channel::Plugin } else { Channel::Runtime }, stream, payload)
            }).collect();
            let bytes: Vec<u8> = messages.iter().flat_map(|message| message.encode().unwrap()).collect();
            prop_assert_eq!(decoded(&bytes, piece), messages);
        }

        #[test]
        fn no_bytes_are_a_panic(pieces in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..20)) {
            let mut decoder = Decoder::default();
            for piece in pieces {
                decoder.push(&piece);
                while let Ok(Some(_)) = decoder.next() {}
            }
        }
    }
}
