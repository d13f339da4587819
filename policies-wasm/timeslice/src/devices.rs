//! The parameter `devices` of a shared resource: all of its devices, the first N, or a list.

use std::fmt;

use berth_policy_sdk::Part;
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Attribute of a MIG instance: its index on its GPU.
const MIG_INDEX: &str = "mig.index";

/// Which devices of a resource are shared.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Devices {
    /// All of them.
    #[default]
    All,
    /// The first devices by index, at least one.
    Count(usize),
    /// These.
    List(Vec<DeviceRef>),
}

/// One device, as NVIDIA's device plugin names it in its configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceRef {
    /// A GPU by its index.
    Gpu(u32),
    /// A MIG instance by the index of its GPU and its own index on that GPU: `0:1`.
    Instance(u32, u32),
    /// A GPU or a MIG instance.
    Uuid(String),
}

impl DeviceRef {
    pub(crate) fn fits(&self, part: &Part) -> bool {
        match self {
            Self::Gpu(index) => part.parent.is_none() && part.gpu_index == *index,
            Self::Instance(gpu, index) => {
                let own = part.attributes.iter().find(|attribute| attribute.key == MIG_INDEX);
                let own = own.and_then(|attribute| attribute.value.parse().ok());
                part.parent.is_some() && part.gpu_index == *gpu && own == Some(*index)
            }
            Self::Uuid(uuid) => part.id == *uuid,
        }
    }

    fn parse(text: &str) -> Option<Self> {
        if text.starts_with("GPU-") || text.starts_with("MIG-") {
            return Some(Self::Uuid(text.to_owned()));
        }
        match text.split_once(':') {
            Some((gpu, index)) => Some(Self::Instance(gpu.parse().ok()?, index.parse().ok()?)),
            None => text.parse().ok().map(Self::Gpu),
        }
    }
}

impl fmt::Display for DeviceRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Gpu(index) => write!(f, "{index}"),
            Self::Instance(gpu, index) => write!(f, "{gpu}:{index}"),
            Self::Uuid(uuid) => f.write_str(uuid),
        }
    }
}

impl<'de> Deserialize<'de> for Devices {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(DevicesVisitor)
    }
}

impl<'de> Deserialize<'de> for DeviceRef {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RefVisitor)
    }
}

// Not `untagged` enums: serde would report any error only as "did not match any variant".
struct DevicesVisitor;
struct RefVisitor;

impl<'de> Visitor<'de> for DevicesVisitor {
    type Value = Devices;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("`all`, a number of devices of at least 1, or a list of devices")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Devices, E> {
        if text == "all" {
            Ok(Devices::All)
        } else {
            Err(E::invalid_value(serde::de::Unexpected::Str(text), &self))
        }
    }

    fn visit_u64<E: Error>(self, count: u64) -> Result<Devices, E> {
        match usize::try_from(count) {
            Ok(count) if count > 0 => Ok(Devices::Count(count)),
            _ => Err(E::invalid_value(serde::de::Unexpected::Unsigned(count), &self)),
        }
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Devices, A::Error> {
        let mut devices = Vec::new();
        while let Some(device) = list.next_element()? {
            devices.push(device);
        }
        if devices.is_empty() { Err(A::Error::invalid_length(0, &self)) } else { Ok(Devices::List(devices)) }
    }
}

impl Visitor<'_> for RefVisitor {
    type Value = DeviceRef;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the index of a GPU (0), that of a MIG instance (`0:1`), or a UUID (`GPU-...`, `MIG-...`)",
        )
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<DeviceRef, E> {
        DeviceRef::parse(text).ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
    }

    fn visit_u64<E: Error>(self, index: u64) -> Result<DeviceRef, E> {
        let index = u32::try_from(index);
        index.map(DeviceRef::Gpu).map_err(|_| E::custom("the index of a GPU is too large"))
    }
}
