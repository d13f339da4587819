//! Frames, of which the journal's files consist. A checksum detects a torn tail.
//!
//! ```text
//! kind 1 | head length 4 | body length 4 | crc32 4 | head | body (deflated)     lengths little-endian
//! node      'N': the head is the sha256 of the inflated body
//! decision  'D': the head is number and time, 8 bytes each
//! ```

use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use flate2::{Compression, Crc};
use std::io::{Error, ErrorKind, Read, Result, Write};

/// Bytes before the head.
const PREFIX_BYTES: usize = 13;
/// Most bytes of an inflated body: a node of 16 GPUs with 128 devices each is about 0.4 MiB of JSON.
const BODY_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// The head of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    Node { digest: [u8; 32] },
    Decision { seq: u64, at_wall_ms: u64 },
}

/// A frame of a file in memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'f> {
    pub(super) head: Head,
    body: &'f [u8],
    /// Bytes of the whole frame.
    pub(super) len: usize,
}

/// Appends a frame to `buffer`.
///
/// # Errors
/// If the deflated body exceeds 4 GiB, which no caller's does.
pub(super) fn write(buffer: &mut Vec<u8>, head: Head, body: &[u8]) -> Result<()> {
    let mut deflated = DeflateEncoder::new(Vec::new(), Compression::fast());
    deflated.write_all(body)?;
    let body = deflated.finish()?;
    let (kind, head) = match head {
        Head::Node { digest } => (b'N', digest.to_vec()),
        Head::Decision { seq, at_wall_ms } => (b'D', [seq.to_le_bytes(), at_wall_ms.to_le_bytes()].concat()),
    };
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(|_| Error::from(ErrorKind::FileTooLarge));
    let (head_len, body_len) = (length(&head)?, length(&body)?);
    buffer.push(kind);
    buffer.extend(head_len.to_le_bytes());
    buffer.extend(body_len.to_le_bytes());
    buffer.extend(checksum(kind, &head, &body).to_le_bytes());
    buffer.extend(head);
    buffer.extend(body);
    Ok(())
}

/// The frames of a file, up to the first incomplete or corrupt one.
pub(super) fn frames(mut bytes: &[u8]) -> impl Iterator<Item = Frame<'_>> {
    std::iter::from_fn(move || {
        let frame = read(bytes)?;
        bytes = &bytes[frame.len..];
        Some(frame)
    })
}

fn read(bytes: &[u8]) -> Option<Frame<'_>> {
    let number = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let kind = *bytes.first()?;
    let (head_len, body_len) = (usize::try_from(number(1)?).ok()?, usize::try_from(number(5)?).ok()?);
    let head_end = PREFIX_BYTES.checked_add(head_len)?;
    let end = head_end.checked_add(body_len)?;
    let (head, body) = (bytes.get(PREFIX_BYTES..head_end)?, bytes.get(head_end..end)?);
    if checksum(kind, head, body) != number(9)? {
        return None;
    }
    let head = match kind {
        b'N' => Head::Node { digest: head.try_into().ok()? },
        b'D' => Head::Decision {
            seq: u64::from_le_bytes(head.get(..8)?.try_into().ok()?),
            at_wall_ms: u64::from_le_bytes(head.get(8..16)?.try_into().ok()?),
        },
        _ => return None,
    };
    Some(Frame { head, body, len: end })
}

impl Frame<'_> {
    /// The number of a decision; `None` for a node.
    pub(super) fn seq(&self) -> Option<u64> {
        match self.head {
            Head::Decision { seq, .. } => Some(seq),
            Head::Node { .. } => None,
        }
    }

    /// The inflated body.
    ///
    /// # Errors
    /// If it cannot be inflated or exceeds [`BODY_BYTES_MAX`].
    pub(super) fn body(&self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        DeflateDecoder::new(self.body).take(BODY_BYTES_MAX + 1).read_to_end(&mut body)?;
        if body.len() as u64 > BODY_BYTES_MAX {
            return Err(Error::new(ErrorKind::InvalidData, "the body is too large"));
        }
        Ok(body)
    }
}

fn checksum(kind: u8, head: &[u8], body: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(&[kind]);
    crc.update(head);
    crc.update(body);
    crc.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_frames() -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, Head::Node { digest: [7; 32] }, b"the node, the node, the node").unwrap();
        write(&mut bytes, Head::Decision { seq: 5, at_wall_ms: 9 }, b"{}").unwrap();
        bytes
    }

    #[test]
    fn written_frames_are_read_back() {
        let bytes = two_frames();
        let read: Vec<_> = frames(&bytes).collect();
        assert_eq!(read[0].head, Head::Node { digest: [7; 32] });
        assert_eq!(read[0].body().unwrap(), b"the node, the node, the node");
        assert_eq!(read[1].head, Head::Decision { seq: 5, at_wall_ms: 9 });
        assert_eq!(read[0].len + read[1].len, bytes.len());
    }

    #[test]
    fn a_file_is_read_up_to_a_torn_frame() {
        let bytes = two_frames();
        let first = frames(&bytes).next().unwrap().len;
        for end in 0..bytes.len() {
            assert_eq!(frames(&bytes[..end]).count(), usize::from(end >= first), "cut at {end}");
        }
    }

    #[test]
    fn a_file_is_read_up_to_a_corrupt_frame() {
        let whole = two_frames();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            assert!(frames(&bytes).count() < 2, "byte {at}");
        }
    }
}
