//! Records as bytes: one leading byte that says the format, then JSON.
//!
//! A key is one byte for the kind and then the name, so that keys sort as [`RecordKey`] does. A name
//! is in the key alone: a value cannot disagree with it.
//!
//! When a record changes its form: raise [`FORMAT`], keep reading the old ones, and add a golden
//! sample of the new form beside the old one in `codec/tests.rs`.

use super::check::Changes;
use super::dto;
use berth_kernel::names::{AllocationId, Digest, PartId};
use berth_kernel::ports::StoreError;
use berth_kernel::record::{Record, RecordKey, Write};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// The format that this release writes, and the newest that it reads.
pub const FORMAT: u8 = 1;

/// Longest value of one record, bytes. sled keeps up to 20 records side by side in one page and
/// moves a page of more than a quarter segment into a file that it never syncs; 20 x 16 KiB stay
/// under a quarter of the 2 MiB segments that the store uses.
pub const RECORD_BYTES_MAX: usize = 16 * 1024;

const META: u8 = 1;
const PART: u8 = 2;
const DRAIN: u8 = 3;
const ALLOCATION: u8 = 4;
const POLICY: u8 = 5;
const STACK: u8 = 6;
const STACK_ENTRY: u8 = 7;
const HEALTH: u8 = 8;
const PAST_STACK: u8 = 9;
const PAST_STACK_ENTRY: u8 = 10;

/// Why bytes are no record of this release.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A later release wrote it.
    #[error("format {0}")]
    Newer(u8),
    /// Anything else; names the record.
    #[error("{0}")]
    Malformed(String),
}

/// The key as the store sorts it.
#[must_use]
pub fn key_bytes(key: &RecordKey) -> Vec<u8> {
    let named = |kind: u8, name: &[u8]| [&[kind], name].concat();
    match key {
        RecordKey::Meta => vec![META],
        RecordKey::Part(id) => named(PART, id.as_str().as_bytes()),
        RecordKey::Drain(gpu) => named(DRAIN, gpu.as_str().as_bytes()),
        RecordKey::Allocation(id) => {
            let mut bytes = named(ALLOCATION, &id.store.to_be_bytes());
            bytes.extend(id.number.to_be_bytes());
            bytes
        }
        RecordKey::Policy(digest) => named(POLICY, digest.as_str().as_bytes()),
        RecordKey::Stack => vec![STACK],
        // usize is at most 64 bits on every target that Rust has.
        RecordKey::StackEntry(i) => named(STACK_ENTRY, &(*i as u64).to_be_bytes()),
        RecordKey::Health(gpu) => named(HEALTH, gpu.as_str().as_bytes()),
        RecordKey::PastStack(revision) => named(PAST_STACK, &revision.to_be_bytes()),
        RecordKey::PastStackEntry(revision, i) => {
            named(PAST_STACK_ENTRY, &[revision.to_be_bytes(), (*i as u64).to_be_bytes()].concat())
        }
    }
}

/// The value as the store keeps it.
///
/// # Errors
/// [`StoreError::TooLarge`] if it is longer than [`RECORD_BYTES_MAX`].
pub fn encode(record: &Record) -> Result<Vec<u8>, StoreError> {
    let value = match record {
        Record::Meta(meta) => json(&dto::Meta::of(meta)),
        Record::Part(part) => json(&dto::Part::of(part)),
        Record::Drain(_, drain) => json(&dto::Drain::of(drain)),
        Record::Allocation(allocation) => json(&dto::Allocation::of(allocation)),
        Record::Policy(version) => json(&dto::Policy::of(version)),
        Record::Stack(head) | Record::PastStack(head) => json(&dto::Stack::of(head)),
        Record::StackEntry(_, entry) | Record::PastStackEntry(_, _, entry) => {
            json(&dto::StackEntry::of(entry))
        }
        Record::Health(health) => json(&dto::Health::of(health)),
    };
    if value.len() > RECORD_BYTES_MAX {
        return Err(StoreError::TooLarge { bytes: value.len(), limit: RECORD_BYTES_MAX });
    }
    Ok(value)
}

/// Reads one record back.
///
/// # Errors
/// If a later release wrote it, or if it is malformed in any way: a record is never read in part.
pub fn decode(key: &[u8], value: &[u8]) -> Result<Record, DecodeError> {
    let named = |why: String| DecodeError::Malformed(format!("{}: {why}", describe(key)));
    let body = versioned(key, value)?;
    Ok(match parse_key(key).map_err(named)? {
        RecordKey::Meta => Record::Meta(parse::<dto::Meta>(body).map_err(named)?.read()),
        RecordKey::Part(id) => {
            let part = parse::<dto::Part>(body).and_then(|p| p.read(id));
            Record::Part(part.map_err(named)?)
        }
        RecordKey::Drain(gpu) => Record::Drain(gpu, parse::<dto::Drain>(body).map_err(named)?.read()),
        RecordKey::Allocation(id) => {
            let allocation = parse::<dto::Allocation>(body).and_then(|a| a.read(id));
            Record::Allocation(allocation.map_err(named)?)
        }
        RecordKey::Policy(digest) => {
            let version = parse::<dto::Policy>(body).and_then(|v| v.read(digest));
            Record::Policy(version.map_err(named)?)
        }
        RecordKey::Stack => Record::Stack(parse::<dto::Stack>(body).map_err(named)?.read()),
        RecordKey::StackEntry(i) => {
            let entry = parse::<dto::StackEntry>(body).and_then(dto::StackEntry::read);
            Record::StackEntry(i, entry.map_err(named)?)
        }
        RecordKey::Health(gpu) => Record::Health(parse::<dto::Health>(body).map_err(named)?.read(gpu)),
        RecordKey::PastStack(revision) => {
            let head = parse::<dto::Stack>(body).map_err(named)?.read();
            if head.revision != revision {
                return Err(named(format!("it says that it is revision {}", head.revision)));
            }
            Record::PastStack(head)
        }
        RecordKey::PastStackEntry(revision, i) => {
            let entry = parse::<dto::StackEntry>(body).and_then(dto::StackEntry::read);
            Record::PastStackEntry(revision, i, entry.map_err(named)?)
        }
    })
}

/// The last write of each key, encoded.
pub(super) fn changes(writes: &[Write]) -> Result<Changes, StoreError> {
    writes
        .iter()
        .map(|write| match write {
            Write::Put(record) => Ok((key_bytes(&record.key()), Some(encode(record)?))),
            Write::Delete(key) => Ok((key_bytes(key), None)),
        })
        .collect()
}

/// The JSON behind the format byte.
pub(super) fn versioned<'v>(key: &[u8], value: &'v [u8]) -> Result<&'v [u8], DecodeError> {
    match value.split_first() {
        Some((&FORMAT, body)) => Ok(body),
        Some((&found, _)) if found > FORMAT => Err(DecodeError::Newer(found)),
        Some((&found, _)) => {
            Err(DecodeError::Malformed(format!("{}: format {found} never was", describe(key))))
        }
        None => Err(DecodeError::Malformed(format!("{}: it is empty", describe(key)))),
    }
}

/// A value of this format.
pub(super) fn json(dto: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![FORMAT];
    // Writing to memory does not fail, and serde_json refuses only maps whose keys are no text:
    // ours are.
    serde_json::to_writer(&mut bytes, dto).expect("a record is plain data");
    bytes
}

/// JSON of this format.
pub(super) fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|e| e.to_string())
}

fn parse_key(key: &[u8]) -> Result<RecordKey, String> {
    let (kind, name) = key.split_first().ok_or("a key without a kind")?;
    let text = || std::str::from_utf8(name).map_err(|e| e.to_string());
    let part = || PartId::parse(text()?).map_err(|e| e.to_string());
    Ok(match (*kind, name.len()) {
        (META, 0) => RecordKey::Meta,
        (PART, _) => RecordKey::Part(part()?),
        (DRAIN, _) => RecordKey::Drain(part()?),
        (ALLOCATION, 12) => RecordKey::Allocation(AllocationId {
            store: u32::from_be_bytes(fixed(&name[..4])?),
            number: u64::from_be_bytes(fixed(&name[4..])?),
        }),
        (POLICY, 64) => RecordKey::Policy(Digest::parse(text()?).map_err(|e| e.to_string())?),
        (STACK, 0) => RecordKey::Stack,
        (STACK_ENTRY, 8) => {
            let number = u64::from_be_bytes(fixed(name)?);
            RecordKey::StackEntry(usize::try_from(number).map_err(|e| e.to_string())?)
        }
        (HEALTH, _) => RecordKey::Health(part()?),
        (PAST_STACK, 8) => RecordKey::PastStack(u64::from_be_bytes(fixed(name)?)),
        (PAST_STACK_ENTRY, 16) => {
            let number = u64::from_be_bytes(fixed(&name[8..])?);
            let i = usize::try_from(number).map_err(|e| e.to_string())?;
            RecordKey::PastStackEntry(u64::from_be_bytes(fixed(&name[..8])?), i)
        }
        _ => return Err("no kind of record has such a key".into()),
    })
}

fn fixed<const N: usize>(bytes: &[u8]) -> Result<[u8; N], String> {
    <[u8; N]>::try_from(bytes).map_err(|e| e.to_string())
}

/// A key for people.
fn describe(key: &[u8]) -> String {
    match parse_key(key) {
        Ok(RecordKey::Meta) => "record meta".into(),
        Ok(RecordKey::Part(id)) => format!("record part {id}"),
        Ok(RecordKey::Drain(gpu)) => format!("record drain {gpu}"),
        Ok(RecordKey::Allocation(id)) => format!("record allocation {id}"),
        Ok(RecordKey::Policy(digest)) => format!("record policy {}", digest.short()),
        Ok(RecordKey::Stack) => "record stack".into(),
        Ok(RecordKey::StackEntry(i)) => format!("record stack entry {i}"),
        Ok(RecordKey::Health(gpu)) => format!("record health {gpu}"),
        Ok(RecordKey::PastStack(revision)) => format!("record past stack {revision}"),
        Ok(RecordKey::PastStackEntry(revision, i)) => format!("record past stack {revision} entry {i}"),
        Err(_) => format!("record with the key {}", key.escape_ascii()),
    }
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
