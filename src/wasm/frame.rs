//! What the compiler's process answers on its standard output: one frame.
//!
//! A kind byte, then for [`Reply::Refused`] and [`Reply::TooCostly`] one text, for [`Reply::Compiled`]
//! the component that a core module became, or nothing where a component came, and the artifact. Each is a length of eight bytes, least first, and that many bytes.

use super::limits::{ARTIFACT_BYTES_MAX, MODULE_BYTES_MAX};

/// Longest frame: both parts at their limits, a kind byte and two lengths.
pub(super) const FRAME_BYTES_MAX: usize = MODULE_BYTES_MAX + ARTIFACT_BYTES_MAX + 1 + 2 * 8;

const COMPILED: u8 = 1;
const REFUSED: u8 = 2;
const TOO_COSTLY: u8 = 3;

/// The compiler's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// It compiles.
    Compiled {
        /// What a core module became; `None`: what came is a component.
        component: Option<Vec<u8>>,
        /// What wasmtime loads.
        artifact: Vec<u8>,
    },
    /// It is no policy, and why.
    Refused(String),
    /// It needs too much.
    TooCostly(String),
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, parts): (u8, Vec<&[u8]>) = match self {
            Self::Compiled { component, artifact } => {
                (COMPILED, vec![component.as_deref().unwrap_or_default(), artifact])
            }
            Self::Refused(words) => (REFUSED, vec![words.as_bytes()]),
            Self::TooCostly(words) => (TOO_COSTLY, vec![words.as_bytes()]),
        };
        let mut frame = vec![kind];
        for part in parts {
            let length = part.len() as u64;
            frame.extend_from_slice(&length.to_le_bytes());
            frame.extend_from_slice(part);
        }
        frame
    }

    /// `None` for anything but one whole frame: the process died in the middle, or wrote something
    /// else.
    pub(super) fn decode(frame: &[u8]) -> Option<Self> {
        let (&kind, mut rest) = frame.split_first()?;
        let mut part = || {
            let (length, after) = rest.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (part, after) = after.split_at_checked(length)?;
            rest = after;
            Some(part.to_vec())
        };
        let reply = match kind {
            // No component is empty.
            COMPILED => Self::Compiled {
                component: Some(part()?).filter(|component| !component.is_empty()),
                artifact: part()?,
            },
            REFUSED => Self::Refused(String::from_utf8(part()?).ok()?),
            TOO_COSTLY => Self::TooCostly(String::from_utf8(part()?).ok()?),
            _ => return None,
        };
        rest.is_empty().then_some(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_read_back_as_written_and_only_whole() {
        let made = Reply::Compiled { component: Some(vec![1, 2, 3]), artifact: vec![] };
        let sent = Reply::Compiled { component: None, artifact: vec![4] };
        for reply in [made, sent, Reply::Refused("why".into()), Reply::TooCostly("\u{e9}".into())] {
            let frame = reply.encode();
            assert_eq!(Reply::decode(&frame), Some(reply));
            for end in 0..frame.len() {
                assert_eq!(Reply::decode(&frame[..end]), None);
            }
            assert_eq!(Reply::decode(&[&frame[..], b"x"].concat()), None);
        }
        assert_eq!(Reply::decode(&[COMPILED, 255, 255, 255, 255, 255, 255, 255, 255]), None);
    }
}
