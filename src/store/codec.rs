//! Encodes records: one byte for the format, then JSON.
//!
//! A key is one byte for the kind, then the name, so that keys sort as [`RecordKey`] does. Only the key
//! has the name, so that a value cannot contradict it.
//!
//! To change the form of a record, raise [`FORMAT`], keep reading the old form, and add golden records
//! of the new form to `codec/golden.rs`. Format 2 differs from format 1 in marks: it has one per owner.
//! Format 3 adds what a stack of a GPUNode has.

use super::dto;
use berth_kernel::ids::names::{AllocationId, Digest, GpuId, PartId};
use berth_kernel::node::ports::StoreError;
use berth_kernel::node::record::{Record, RecordKey, Write};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;

/// The format that this release writes, and the newest one that it reads.
pub const FORMAT: u8 = 3;
/// The oldest format that it reads.
const FORMAT_MIN: u8 = 1;

/// Most bytes of a record's value. sled keeps up to 20 records in one page and writes a page of more
/// than a quarter segment to a file that it never syncs; 20 x 16 KiB are less than a quarter of the
/// store's 2 MiB segments.
pub const RECORD_BYTES_MAX: usize = 16 * 1024;

const META: u8 = 1;
const PART: u8 = 2;
const MARKS: u8 = 3;
const ALLOCATION: u8 = 4;
const POLICY: u8 = 5;
const STACK: u8 = 6;
const STACK_ENTRY: u8 = 7;
const HEALTH: u8 = 8;
const PAST_STACK: u8 = 9;
const PAST_STACK_ENTRY: u8 = 10;
const VIA: u8 = 11;

/// Why bytes could not be decoded as a record.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// A later release wrote the record.
    #[error("format {0}")]
    Newer(u8),
    /// Any other error; names the record.
    #[error("{0}")]
    Malformed(String),
}

/// Encodes a key; encoded keys sort as keys do.
#[must_use]
pub fn key_bytes(key: &RecordKey) -> Vec<u8> {
    let named = |kind: u8, name: &[u8]| [&[kind], name].concat();
    match key {
        RecordKey::Meta => vec![META],
        RecordKey::Part(id) => named(PART, id.as_str().as_bytes()),
        RecordKey::Marks(gpu) => named(MARKS, gpu.as_str().as_bytes()),
        RecordKey::Allocation(id) => {
            let mut bytes = named(ALLOCATION, &id.store.to_be_bytes());
            bytes.extend(id.number.to_be_bytes());
            bytes
        }
        RecordKey::Policy(digest) => named(POLICY, digest.as_str().as_bytes()),
        RecordKey::Stack => vec![STACK],
        // usize has at most 64 bits on every target of Rust.
        RecordKey::StackEntry(i) => named(STACK_ENTRY, &(*i as u64).to_be_bytes()),
        RecordKey::Health(gpu) => named(HEALTH, gpu.as_str().as_bytes()),
        RecordKey::PastStack(revision) => named(PAST_STACK, &revision.to_be_bytes()),
        RecordKey::PastStackEntry(revision, i) => {
            named(PAST_STACK_ENTRY, &[revision.to_be_bytes(), (*i as u64).to_be_bytes()].concat())
        }
        RecordKey::Via(gpu) => named(VIA, gpu.as_str().as_bytes()),
    }
}

/// Encodes a record's value.
///
/// # Errors
/// [`StoreError::TooLarge`] if it is longer than [`RECORD_BYTES_MAX`].
pub fn encode(record: &Record) -> Result<Vec<u8>, StoreError> {
    let value = match record {
        Record::Meta(meta) => encode_json(&dto::Meta(*meta)),
        Record::Part(part) => encode_json(&dto::Part::from_kernel(part)),
        Record::Marks(_, marks) => encode_json(&dto::Marks::from_kernel(marks)),
        Record::Via(_, via) => encode_json(&dto::Via::from_kernel(via)),
        Record::Allocation(allocation) => encode_json(&dto::Allocation::from_kernel(allocation)),
        Record::Policy(version) => encode_json(&dto::Policy::from_kernel(version)),
        Record::Stack(head) | Record::PastStack(head) => encode_json(&dto::Stack::from_kernel(head)),
        Record::StackEntry(_, entry) | Record::PastStackEntry(_, _, entry) => {
            encode_json(&dto::StackEntry::from_kernel(entry))
        }
        Record::Health(health) => encode_json(&dto::Health::from_kernel(health)),
    };
    if value.len() > RECORD_BYTES_MAX {
        return Err(StoreError::TooLarge { bytes: value.len(), limit: RECORD_BYTES_MAX });
    }
    Ok(value)
}

/// Decodes a record.
///
/// # Errors
/// If a later release wrote it, or any part of it is malformed.
pub fn decode(key: &[u8], value: &[u8]) -> Result<Record, DecodeError> {
    let (format, body) = split_format(key, value)?;
    decode_body(key, format, body).map_err(|why| DecodeError::Malformed(format!("{}: {why}", describe(key))))
}

fn decode_body(key: &[u8], format: u8, body: &[u8]) -> Result<Record, String> {
    Ok(match parse_key(key)? {
        RecordKey::Meta => Record::Meta(parse_json::<dto::Meta>(body)?.0),
        RecordKey::Part(id) => Record::Part(parse_json::<dto::Part>(body)?.into_kernel(id)?),
        RecordKey::Marks(gpu) if format == 1 => {
            Record::Marks(gpu, parse_json::<dto::MarksOfFormat1>(body)?.into_kernel())
        }
        RecordKey::Marks(gpu) => Record::Marks(gpu, parse_json::<dto::Marks>(body)?.into_kernel()?),
        RecordKey::Via(gpu) => Record::Via(gpu, parse_json::<dto::Via>(body)?.into_kernel()?),
        RecordKey::Allocation(id) => {
            Record::Allocation(parse_json::<dto::Allocation>(body)?.into_kernel(id)?)
        }
        RecordKey::Policy(digest) => Record::Policy(parse_json::<dto::Policy>(body)?.into_kernel(digest)?),
        RecordKey::Stack => Record::Stack(parse_json::<dto::Stack>(body)?.into_kernel()),
        RecordKey::StackEntry(i) => {
            Record::StackEntry(i, parse_json::<dto::StackEntry>(body)?.into_kernel()?)
        }
        RecordKey::Health(gpu) => Record::Health(parse_json::<dto::Health>(body)?.into_kernel(gpu)?),
        RecordKey::PastStack(revision) => {
            let head = parse_json::<dto::Stack>(body)?.into_kernel();
            if head.revision != revision {
                return Err(format!("its value is of revision {}", head.revision));
            }
            Record::PastStack(head)
        }
        RecordKey::PastStackEntry(revision, i) => {
            Record::PastStackEntry(revision, i, parse_json::<dto::StackEntry>(body)?.into_kernel()?)
        }
    })
}

/// The new value of each key of an append; `None` deletes the key.
pub(super) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// Encodes the last write of each key.
pub(super) fn changes(writes: &[Write]) -> Result<Changes, StoreError> {
    writes
        .iter()
        .map(|write| match write {
            Write::Put(record) => Ok((key_bytes(&record.key()), Some(encode(record)?))),
            Write::Delete(key) => Ok((key_bytes(key), None)),
        })
        .collect()
}

/// The format byte, and the JSON after it.
pub(super) fn split_format<'v>(key: &[u8], value: &'v [u8]) -> Result<(u8, &'v [u8]), DecodeError> {
    match value.split_first() {
        Some((&format @ FORMAT_MIN..=FORMAT, body)) => Ok((format, body)),
        Some((&found, _)) if found > FORMAT => Err(DecodeError::Newer(found)),
        Some((&found, _)) => {
            Err(DecodeError::Malformed(format!("{}: format {found} does not exist", describe(key))))
        }
        None => Err(DecodeError::Malformed(format!("{}: it is empty", describe(key)))),
    }
}

/// Encodes a value in the current format.
pub(super) fn encode_json(dto: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![FORMAT];
    // Writing to memory cannot fail, and serde_json only rejects maps whose keys are not strings.
    serde_json::to_writer(&mut bytes, dto).expect("a record has only string keys");
    bytes
}

/// Parses JSON.
pub(super) fn parse_json<T: DeserializeOwned>(body: &[u8]) -> Result<T, String> {
    serde_json::from_slice(body).map_err(|e| e.to_string())
}

fn parse_key(key: &[u8]) -> Result<RecordKey, String> {
    let (kind, name) = key.split_first().ok_or("the key is empty")?;
    let text = || std::str::from_utf8(name).map_err(|e| e.to_string());
    let part = || PartId::parse(text()?).map_err(|e| e.to_string());
    let gpu = || GpuId::parse(text()?).map_err(|e| e.to_string());
    let number = |bytes| Ok::<_, String>(u64::from_be_bytes(to_array(bytes)?));
    let index = |bytes| usize::try_from(number(bytes)?).map_err(|e| e.to_string());
    Ok(match (*kind, name.len()) {
        (META, 0) => RecordKey::Meta,
        (PART, _) => RecordKey::Part(part()?),
        (MARKS, _) => RecordKey::Marks(gpu()?),
        (ALLOCATION, 12) => RecordKey::Allocation(AllocationId {
            store: u32::from_be_bytes(to_array(&name[..4])?),
            number: number(&name[4..])?,
        }),
        (POLICY, 64) => RecordKey::Policy(Digest::parse(text()?).map_err(|e| e.to_string())?),
        (STACK, 0) => RecordKey::Stack,
        (STACK_ENTRY, 8) => RecordKey::StackEntry(index(name)?),
        (HEALTH, _) => RecordKey::Health(gpu()?),
        (PAST_STACK, 8) => RecordKey::PastStack(number(name)?),
        (PAST_STACK_ENTRY, 16) => RecordKey::PastStackEntry(number(&name[..8])?, index(&name[8..])?),
        (VIA, _) => RecordKey::Via(gpu()?),
        _ => return Err("no record kind has such a key".into()),
    })
}

fn to_array<const N: usize>(bytes: &[u8]) -> Result<[u8; N], String> {
    <[u8; N]>::try_from(bytes).map_err(|e| e.to_string())
}

/// A key in error messages.
fn describe(key: &[u8]) -> String {
    match parse_key(key) {
        Ok(RecordKey::Meta) => "record meta".into(),
        Ok(RecordKey::Part(id)) => format!("record part {id}"),
        Ok(RecordKey::Marks(gpu)) => format!("record drain {gpu}"),
        Ok(RecordKey::Allocation(id)) => format!("record allocation {id}"),
        Ok(RecordKey::Policy(digest)) => format!("record policy {}", digest.short()),
        Ok(RecordKey::Stack) => "record stack".into(),
        Ok(RecordKey::StackEntry(i)) => format!("record stack entry {i}"),
        Ok(RecordKey::Health(gpu)) => format!("record health {gpu}"),
        Ok(RecordKey::PastStack(revision)) => format!("record past stack {revision}"),
        Ok(RecordKey::PastStackEntry(revision, i)) => format!("record past stack {revision} entry {i}"),
        Ok(RecordKey::Via(gpu)) => format!("record via {gpu}"),
        Err(_) => format!("record with the key {}", key.escape_ascii()),
    }
}

#[cfg(test)]
mod golden;
#[cfg(test)]
mod tests;
