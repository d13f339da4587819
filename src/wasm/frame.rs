//! The frame that the compiler process writes to its standard output.
//!
//! A frame is a kind byte and its fields: a text for [`Reply::Refused`] and [`Reply::TooCostly`], the component and
//! the artifact for [`Reply::Compiled`]. The component is empty if the module was one already. A field is its length
//! (eight bytes, little-endian) and its bytes.

use super::limits::{ARTIFACT_BYTES_MAX, MODULE_BYTES_MAX};

/// Longest frame: both fields at their limits, a kind byte and two lengths.
pub(super) const FRAME_BYTES_MAX: usize = MODULE_BYTES_MAX + ARTIFACT_BYTES_MAX + 1 + 2 * 8;

const COMPILED: u8 = 1;
const REFUSED: u8 = 2;
const TOO_COSTLY: u8 = 3;

/// The compiler's reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// The module was compiled.
    Compiled {
        /// The component that was made from a core module; `None` if the module is a component.
        component: Option<Vec<u8>>,
        /// The compiled code that wasmtime loads.
        artifact: Vec<u8>,
    },
    /// The module is not a policy, for this reason.
    Refused(String),
    /// Compilation exceeds this limit.
    TooCostly(String),
}

impl Reply {
    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, fields): (u8, Vec<&[u8]>) = match self {
            Self::Compiled { component, artifact } => {
                (COMPILED, vec![component.as_deref().unwrap_or_default(), artifact])
            }
            Self::Refused(reason) => (REFUSED, vec![reason.as_bytes()]),
            Self::TooCostly(limit) => (TOO_COSTLY, vec![limit.as_bytes()]),
        };
        let mut frame = vec![kind];
        for field in fields {
            let length = field.len() as u64;
            frame.extend_from_slice(&length.to_le_bytes());
            frame.extend_from_slice(field);
        }
        frame
    }

    /// `None` unless `frame` is exactly one complete frame.
    pub(super) fn decode(frame: &[u8]) -> Option<Self> {
        let (&kind, mut rest) = frame.split_first()?;
        let mut field = || {
            let (length, after) = rest.split_first_chunk::<8>()?;
            let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
            let (field, after) = after.split_at_checked(length)?;
            rest = after;
            Some(field.to_vec())
        };
        let reply = match kind {
            COMPILED => Self::Compiled {
                component: Some(field()?).filter(|component| !component.is_empty()),
                artifact: field()?,
            },
            REFUSED => Self::Refused(String::from_utf8(field()?).ok()?),
            TOO_COSTLY => Self::TooCostly(String::from_utf8(field()?).ok()?),
            _ => return None,
        };
        rest.is_empty().then_some(reply)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_decoded_as_encoded_and_only_if_complete() {
        let converted = Reply::Compiled { component: Some(vec![1, 2, 3]), artifact: vec![] };
        let unconverted = Reply::Compiled { component: None, artifact: vec![4] };
        for reply in [converted, unconverted, Reply::Refused("why".into()), Reply::TooCostly("\u{e9}".into())]
        {
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
