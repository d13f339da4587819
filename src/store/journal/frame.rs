//! What a file of the journal is made of: frames with a checksum, so that a tail that was torn is
//! told from what is whole.
//!
//! ```text
//! kind 1 | head length 4 | body length 4 | crc32 4 | head | body (deflated)     lengths little-endian
//! node      'N': head is the sha256 of the body before it was deflated
//! decision  'D': head is number and time, 8 bytes each
//! ```

use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use flate2::{Compression, Crc};
use std::io::{Error, ErrorKind, Read, Result, Write};

/// Bytes before the head.
const FIXED: usize = 13;
/// Most that a body may become when it is inflated: a node of 16 GPUs with 128 devices each is some
/// 0.4 MiB of JSON.
const BODY_BYTES_MAX: u64 = 16 * 1024 * 1024;

/// What a frame holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    Node { digest: [u8; 32] },
    Decision { seq: u64, at_wall_ms: u64 },
}

/// A frame where it lies.
#[derive(Clone, Copy, Debug)]
pub(super) struct Frame<'f> {
    pub(super) head: Head,
    body: &'f [u8],
    /// Its length with everything.
    pub(super) len: usize,
}

/// Adds a frame.
///
/// # Errors
/// If the body has over 4 GiB, which nothing here has.
pub(super) fn write(to: &mut Vec<u8>, head: Head, body: &[u8]) -> Result<()> {
    let mut deflated = DeflateEncoder::new(Vec::new(), Compression::fast());
    deflated.write_all(body)?;
    let body = deflated.finish()?;
    let (kind, head) = match head {
        Head::Node { digest } => (b'N', digest.to_vec()),
        Head::Decision { seq, at_wall_ms } => (b'D', [seq.to_le_bytes(), at_wall_ms.to_le_bytes()].concat()),
    };
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).map_err(|_| Error::from(ErrorKind::FileTooLarge));
    let (head_len, body_len) = (length(&head)?, length(&body)?);
    to.push(kind);
    to.extend(head_len.to_le_bytes());
    to.extend(body_len.to_le_bytes());
    to.extend(sum(kind, &head, &body).to_le_bytes());
    to.extend(head);
    to.extend(body);
    Ok(())
}

/// The frames of a file, up to the first that is not whole.
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
    let head_end = FIXED.checked_add(head_len)?;
    let end = head_end.checked_add(body_len)?;
    let (head, body) = (bytes.get(FIXED..head_end)?, bytes.get(head_end..end)?);
    if sum(kind, head, body) != number(9)? {
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
    /// The body as it was handed in.
    ///
    /// # Errors
    /// If it is not what was deflated, or absurdly large.
    pub(super) fn body(&self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        DeflateDecoder::new(self.body).take(BODY_BYTES_MAX + 1).read_to_end(&mut body)?;
        if body.len() as u64 > BODY_BYTES_MAX {
            return Err(Error::new(ErrorKind::InvalidData, "a body that is too large"));
        }
        Ok(body)
    }
}

fn sum(kind: u8, head: &[u8], body: &[u8]) -> u32 {
    let mut crc = Crc::new();
    crc.update(&[kind]);
    crc.update(head);
    crc.update(body);
    crc.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some() -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, Head::Node { digest: [7; 32] }, b"the node, the node, the node").unwrap();
        write(&mut bytes, Head::Decision { seq: 5, at_wall_ms: 9 }, b"{}").unwrap();
        bytes
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = some();
        let read: Vec<_> = frames(&bytes).collect();
        assert_eq!(read[0].head, Head::Node { digest: [7; 32] });
        assert_eq!(read[0].body().unwrap(), b"the node, the node, the node");
        assert_eq!(read[1].head, Head::Decision { seq: 5, at_wall_ms: 9 });
        assert_eq!(read[0].len + read[1].len, bytes.len());
    }

    #[test]
    fn a_torn_tail_ends_the_file_wherever_it_is_torn() {
        let bytes = some();
        let first = frames(&bytes).next().unwrap().len;
        for end in 0..bytes.len() {
            assert_eq!(frames(&bytes[..end]).count(), usize::from(end >= first), "cut at {end}");
        }
    }

    #[test]
    fn a_flipped_bit_ends_the_file() {
        let whole = some();
        for at in 0..whole.len() {
            let mut bytes = whole.clone();
            bytes[at] ^= 1;
            assert!(frames(&bytes).count() < 2, "byte {at}");
        }
    }
}
