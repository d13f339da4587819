//! A store as text and back: `berth state export`, `import` and `verify`; and an empty one: `init`.
//!
//! JSON lines: first a header that says the format and how many records follow, then a record a
//! line, in the order of their keys. The number tells a file that was cut off. A record's value is what
//! the store keeps, so importing what was exported gives the same ledger.

use super::codec::{self, DecodeError, FORMAT};
use super::sled::SledStore;
use berth_kernel::names::{AllocationId, Digest, PartId};
use berth_kernel::ports::{Store, StoreError};
use berth_kernel::record::{Record, RecordKey, Write};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, Read};
use std::path::Path;

/// The format of the lines around the records.
const LINES_FORMAT: u32 = 1;
/// The longest line, bytes: a record of [`codec::RECORD_BYTES_MAX`] with its kind and name.
const LINE_BYTES_MAX: u64 = 32 * 1024;
/// Records of one append while importing: with 16 KiB each, 1 MiB, half a segment of the log.
const APPEND_RECORDS: usize = 64;
/// The folder that an import is made in, before it becomes the store by one rename.
const UNFINISHED: &str = "store.import";

/// What a store was found to hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Appends that it took, its making among them.
    pub appends: u64,
    /// Records in all.
    pub records: usize,
    /// Records by kind.
    pub kinds: BTreeMap<&'static str, usize>,
}

/// Why a store could not be read out or in.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The store's own trouble.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is none.
    #[error("{path} holds no store; name the state folder of a stopped daemon, or a copy of it")]
    None {
        /// The state folder.
        path: String,
    },
    /// There is one, and it is not overwritten.
    #[error("{path} holds a store already: move its folder store/ away first, or name another state folder")]
    Exists {
        /// The state folder.
        path: String,
    },
    /// A line is not what it should be.
    #[error("line {number}: {what}; nothing was imported")]
    Line {
        /// Counted from 1.
        number: usize,
        /// What is wrong.
        what: String,
    },
    /// The system's trouble.
    #[error("{doing}")]
    Io {
        /// What was being done.
        doing: String,
        /// The system's words.
        #[source]
        source: io::Error,
    },
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Header {
    berth_state: u32,
    record_format: u8,
    records: usize,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    kind: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    value: Box<RawValue>,
}

/// Reads everything in the store of a state folder and changes nothing there.
///
/// # Errors
/// If there is none, another process has it, or it is damaged.
pub fn verify(state_dir: &Path) -> Result<Summary, TransferError> {
    let (appends, records) = read(state_dir)?;
    let mut kinds = BTreeMap::new();
    for record in &records {
        *kinds.entry(name_of(&record.key()).0).or_default() += 1;
    }
    Ok(Summary { appends, records: records.len(), kinds })
}

/// Writes everything in the store of a state folder as JSON lines.
///
/// # Errors
/// As [`verify`], or if it cannot be written.
pub fn export(state_dir: &Path, out: &mut dyn io::Write) -> Result<(), TransferError> {
    let (_, records) = read(state_dir)?;
    let header = Header { berth_state: LINES_FORMAT, record_format: FORMAT, records: records.len() };
    put(out, &header)?;
    for record in &records {
        let (kind, name) = name_of(&record.key());
        let value = codec::encode(record)?;
        // What the codec wrote is JSON behind one byte.
        let value = serde_json::from_slice(&value[1..]).map_err(|e| writing(e.into()))?;
        put(out, &Line { kind: kind.into(), name, value })?;
    }
    out.flush().map_err(writing)
}

fn put(out: &mut dyn io::Write, line: &impl Serialize) -> Result<(), TransferError> {
    let written = serde_json::to_vec(line).map_err(io::Error::from).and_then(|mut text| {
        text.push(b'\n');
        out.write_all(&text)
    });
    written.map_err(writing)
}

fn writing(source: io::Error) -> TransferError {
    TransferError::Io { doing: "writing the export".into(), source }
}

/// Makes the store of a state folder that has none from JSON lines. Every line is read and checked
/// before the store appears, which is in one step.
///
/// # Errors
/// If there is a store, or a line is wrong or missing.
pub fn import(state_dir: &Path, lines: &mut dyn BufRead) -> Result<Summary, TransferError> {
    let store = state_dir.join("store");
    let exists = || TransferError::Exists { path: state_dir.display().to_string() };
    if store.join("data").exists() {
        return Err(exists());
    }
    let records = parse(lines)?;
    let io = |source| TransferError::Io { doing: format!("importing into {}", state_dir.display()), source };
    let unfinished = state_dir.join(UNFINISHED);
    match fs::remove_dir_all(&unfinished) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(io(e)),
        _ => {}
    }
    fs::create_dir_all(&unfinished).map_err(io)?;
    let new = unfinished.join("store");
    let placed = fill(&new, &records).and_then(|()| SledStore::place(&store, &new));
    // Swept away by the next import, if not now.
    let _ = fs::remove_dir_all(&unfinished);
    if !placed? {
        return Err(exists());
    }
    verify(state_dir)
}

/// Makes an empty store in a state folder that has none, also where one was made before and is gone.
///
/// # Errors
/// If there is a store, or it cannot be made.
pub fn init(state_dir: &Path) -> Result<Summary, TransferError> {
    let io = |source| TransferError::Io { doing: format!("making {}", state_dir.display()), source };
    fs::create_dir_all(state_dir).map_err(io)?;
    if !SledStore::init(&state_dir.join("store"))? {
        return Err(TransferError::Exists { path: state_dir.display().to_string() });
    }
    verify(state_dir)
}

fn fill(path: &Path, records: &[Record]) -> Result<(), StoreError> {
    let mut store = SledStore::open(path)?;
    for some in records.chunks(APPEND_RECORDS) {
        let writes: Vec<Write> = some.iter().cloned().map(Write::Put).collect();
        store.append(&writes)?;
    }
    if store.load()? == records {
        return Ok(());
    }
    Err(StoreError::Damaged {
        path: path.display().to_string(),
        what: "what was imported is not what is there".into(),
    })
}

fn read(state_dir: &Path) -> Result<(u64, Vec<Record>), TransferError> {
    let store = state_dir.join("store");
    if !store.join("data").is_dir() {
        return Err(TransferError::None { path: state_dir.display().to_string() });
    }
    Ok(SledStore::read(&store)?)
}

fn parse(lines: &mut dyn BufRead) -> Result<Vec<Record>, TransferError> {
    let mut number = 0;
    let mut next = |text: &mut Vec<u8>| -> Result<(usize, bool), TransferError> {
        number += 1;
        text.clear();
        let wrong = |what: String| TransferError::Line { number, what };
        let mut limited = lines.take(LINE_BYTES_MAX);
        limited.read_until(b'\n', text).map_err(|e| wrong(e.to_string()))?;
        if text.len() as u64 == LINE_BYTES_MAX {
            return Err(wrong(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        Ok((number, !text.is_empty()))
    };
    let mut text = Vec::new();
    next(&mut text)?;
    let wrong = |number, what: String| TransferError::Line { number, what };
    let header: Header = serde_json::from_slice(&text)
        .map_err(|e| wrong(1, format!("not the first line of `berth state export`: {e}")))?;
    if header.berth_state != LINES_FORMAT || header.record_format > FORMAT {
        let Header { berth_state, record_format, .. } = header;
        let what = format!("format {berth_state}/{record_format} is of a newer berth: import it with that");
        return Err(wrong(1, what));
    }
    let mut records: Vec<Record> = Vec::new();
    loop {
        let (number, more) = next(&mut text)?;
        if !more {
            break;
        }
        let record = record(&text, header.record_format).map_err(|what| wrong(number, what))?;
        if records.last().is_some_and(|last| last.key() >= record.key()) {
            return Err(wrong(number, "out of order, or the same record again".into()));
        }
        records.push(record);
    }
    if records.len() != header.records {
        let what = format!("the file ends after {} of {} records", records.len(), header.records);
        return Err(wrong(records.len() + 2, what));
    }
    if !matches!(records.first(), Some(Record::Meta(_))) {
        return Err(wrong(2, "the record `meta` is missing".into()));
    }
    Ok(records)
}

fn record(line: &[u8], format: u8) -> Result<Record, String> {
    let line: Line = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let key = key_of(&line.kind, line.name.as_deref())?;
    let value = [&[format], line.value.get().as_bytes()].concat();
    codec::decode(&codec::key_bytes(&key), &value).map_err(|e| match e {
        DecodeError::Newer(found) => format!("format {found}"),
        DecodeError::Malformed(what) => what,
    })
}

/// A key as its kind and its name.
fn name_of(key: &RecordKey) -> (&'static str, Option<String>) {
    match key {
        RecordKey::Meta => ("meta", None),
        RecordKey::Part(id) => ("part", Some(id.to_string())),
        RecordKey::Drain(gpu) => ("drain", Some(gpu.to_string())),
        RecordKey::Allocation(id) => ("allocation", Some(id.to_string())),
        RecordKey::Policy(digest) => ("policy", Some(digest.as_str().to_owned())),
        RecordKey::Health(gpu) => ("health", Some(gpu.to_string())),
        RecordKey::Stack => ("stack", None),
        RecordKey::StackEntry(i) => ("stackEntry", Some(i.to_string())),
        RecordKey::PastStack(revision) => ("pastStack", Some(revision.to_string())),
        RecordKey::PastStackEntry(revision, i) => ("pastStackEntry", Some(format!("{revision}/{i}"))),
    }
}

fn key_of(kind: &str, name: Option<&str>) -> Result<RecordKey, String> {
    let named = || name.ok_or_else(|| format!("a record of kind {kind} has a name"));
    let part = || PartId::parse(named()?).map_err(|e| e.to_string());
    Ok(match kind {
        "meta" => RecordKey::Meta,
        "part" => RecordKey::Part(part()?),
        "drain" => RecordKey::Drain(part()?),
        "health" => RecordKey::Health(part()?),
        "allocation" => RecordKey::Allocation(AllocationId::parse(named()?).map_err(|e| e.to_string())?),
        "policy" => RecordKey::Policy(Digest::parse(named()?).map_err(|e| e.to_string())?),
        "stack" => RecordKey::Stack,
        "stackEntry" => RecordKey::StackEntry(named()?.parse().map_err(|e| format!("{e}"))?),
        "pastStack" => RecordKey::PastStack(named()?.parse().map_err(|e| format!("{e}"))?),
        "pastStackEntry" => {
            let name = named()?;
            let (revision, i) = name.split_once('/').ok_or("a pastStackEntry is named REVISION/PLACE")?;
            let revision = revision.parse().map_err(|e| format!("{e}"))?;
            RecordKey::PastStackEntry(revision, i.parse().map_err(|e| format!("{e}"))?)
        }
        other => return Err(format!("no record is of kind {other}")),
    })
}
