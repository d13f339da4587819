//! Events of the state file.

use serde::{Deserialize, Serialize};

/// Something that happened to a GPU. An event set gets every event of its GPUs with a higher `seq` than any that stood
/// in the file when the set was created, once.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Event {
    /// Sequence number: unique in the file, and larger than that of every earlier event, also of those since removed
    /// from the file.
    pub seq: u64,
    /// UUID of the GPU.
    pub gpu: String,
    /// What kind of event.
    #[serde(default)]
    pub kind: EventKind,
    /// The XID of an `xid` event; else 0.
    #[serde(default)]
    pub data: u64,
    /// GPU instance id, if the event belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu_instance: Option<u32>,
    /// Compute instance id, if the event belongs to one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute_instance: Option<u32>,
}

/// `nvmlEventType*`; the number is the bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EventKind {
    /// Single bit ECC error.
    SingleBitEcc = 1,
    /// Double bit ECC error.
    DoubleBitEcc = 2,
    /// Critical XID error.
    #[default]
    Xid = 8,
    /// The recovery action changed.
    RecoveryAction = 0x8000,
}

impl EventKind {
    /// Every bit that [`Event`] can carry: what `nvmlDeviceGetSupportedEventTypes` answers.
    pub(crate) const ALL: u64 = Self::SingleBitEcc as u64
        | Self::DoubleBitEcc as u64
        | Self::Xid as u64
        | Self::RecoveryAction as u64;

    /// The bit of `nvmlEventType*`.
    pub(crate) fn bit(self) -> u64 {
        self as u64
    }
}
