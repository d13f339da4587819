//! Commands on a closed store: `berth state export`, `import`, `verify` and `init`.
//!
//! An export is JSON lines: a header with the format and the number of records, by which a truncated
//! file is detected, then one record per line in the order of keys. Values are those of the store, so
//! that an import of an export gives the same ledger.

use super::codec::{self, DecodeError, FORMAT};
use super::folder;
use super::sled::{RECORDS_PER_APPEND, SledStore};
use berth_kernel::ids::names::{AllocationId, Digest, GpuId, PartId};
use berth_kernel::node::ports::{Store, StoreError};
use berth_kernel::node::record::{Record, RecordKey, Write};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead, Read};
use std::path::Path;

/// The format of the header and the lines.
const LINES_FORMAT: u32 = 1;
/// Most bytes of a line: a record of [`codec::RECORD_BYTES_MAX`] with its kind and name.
const LINE_BYTES_MAX: u64 = 32 * 1024;
/// The folder of an unfinished import, which becomes the store by one rename.
const UNFINISHED: &str = "store.import";

/// The contents of a verified store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// Appends to the store, including the one that created it.
    pub appends: u64,
    /// The number of records.
    pub records: usize,
    /// The number of records of each kind.
    pub kinds: BTreeMap<&'static str, usize>,
}

/// Why a store could not be exported, imported, verified or created.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The state folder has no store.
    #[error(
        "{path} holds no store: name the state folder of a stopped daemon, or a copy of it, with --state-dir"
    )]
    NoStore {
        /// The state folder.
        path: String,
    },
    /// The state folder has a store, which is not overwritten.
    #[error("{path} holds a store already: move its folder store/ away first, or name another state folder")]
    Exists {
        /// The state folder.
        path: String,
    },
    /// A line of the file is invalid.
    #[error("line {number}: {what}; nothing was imported")]
    Line {
        /// The line's number, from 1.
        number: usize,
        /// What is wrong.
        what: String,
    },
    /// The system failed.
    #[error("{doing}")]
    Io {
        /// The operation that failed.
        doing: String,
        /// The system's error.
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

/// Reads and verifies all records in the store of a state folder, without changes.
///
/// # Errors
/// If there is no store, another process has it open, or it is damaged.
pub fn verify(state_dir: &Path) -> Result<Summary, TransferError> {
    let (appends, records) = read_store(state_dir)?;
    let mut kinds = BTreeMap::new();
    for record in &records {
        *kinds.entry(split_key(&record.key()).0).or_default() += 1;
    }
    Ok(Summary { appends, records: records.len(), kinds })
}

/// Writes all records in the store of a state folder as JSON lines.
///
/// # Errors
/// As [`verify`], or if `out` cannot be written.
pub fn export(state_dir: &Path, out: &mut dyn io::Write) -> Result<(), TransferError> {
    let (_, records) = read_store(state_dir)?;
    let header = Header { berth_state: LINES_FORMAT, record_format: FORMAT, records: records.len() };
    write_line(out, &header)?;
    for record in &records {
        let (kind, name) = split_key(&record.key());
        let value = codec::encode(record)?;
        // The codec writes one byte for the format, then JSON.
        let value = serde_json::from_slice(&value[1..]).map_err(|e| write_error(e.into()))?;
        write_line(out, &Line { kind: kind.into(), name, value })?;
    }
    out.flush().map_err(write_error)
}

fn write_line(out: &mut dyn io::Write, line: &impl Serialize) -> Result<(), TransferError> {
    let written = serde_json::to_vec(line).map_err(io::Error::from).and_then(|mut text| {
        text.push(b'\n');
        out.write_all(&text)
    });
    written.map_err(write_error)
}

fn write_error(source: io::Error) -> TransferError {
    TransferError::Io { doing: "writing the export".into(), source }
}

/// Creates the store of a state folder from JSON lines, atomically after all lines are checked.
///
/// # Errors
/// If the folder has a store, or a line is invalid or missing.
pub fn import(state_dir: &Path, lines: &mut dyn BufRead) -> Result<Summary, TransferError> {
    let store = state_dir.join("store");
    let exists = || TransferError::Exists { path: state_dir.display().to_string() };
    if store.join("data").exists() {
        return Err(exists());
    }
    let records = parse(lines)?;
    let io = |source| TransferError::Io { doing: format!("importing into {}", state_dir.display()), source };
    let unfinished = state_dir.join(UNFINISHED);
    folder::remove(&unfinished).and_then(|()| fs::create_dir_all(&unfinished)).map_err(io)?;
    let new = unfinished.join("store");
    let installed = write_records(&new, &records).and_then(|()| SledStore::install(&store, &new));
    // If this fails, the next import removes it.
    let _ = fs::remove_dir_all(&unfinished);
    if !installed? {
        return Err(exists());
    }
    verify(state_dir)
}

/// Creates an empty store in a state folder, even if an earlier store is missing.
///
/// # Errors
/// If the folder has a store, or one cannot be created.
pub fn init(state_dir: &Path) -> Result<Summary, TransferError> {
    let io = |source| TransferError::Io { doing: format!("creating {}", state_dir.display()), source };
    fs::create_dir_all(state_dir).map_err(io)?;
    if !SledStore::init(&state_dir.join("store"))? {
        return Err(TransferError::Exists { path: state_dir.display().to_string() });
    }
    verify(state_dir)
}

fn write_records(path: &Path, records: &[Record]) -> Result<(), StoreError> {
    let mut store = SledStore::open(path)?;
    for chunk in records.chunks(RECORDS_PER_APPEND) {
        let writes: Vec<Write> = chunk.iter().cloned().map(Write::Put).collect();
        store.append(&writes)?;
    }
    if store.load()? == records {
        return Ok(());
    }
    Err(StoreError::Damaged {
        path: path.display().to_string(),
        what: "its records differ from the imported ones".into(),
    })
}

fn read_store(state_dir: &Path) -> Result<(u64, Vec<Record>), TransferError> {
    let store = state_dir.join("store");
    let data = store.join("data");
    match fs::metadata(&data) {
        Ok(data) if data.is_dir() => Ok(SledStore::read(&store)?),
        Err(source) if source.kind() == io::ErrorKind::PermissionDenied => Err(TransferError::Io {
            doing: format!("reading {} (run as the owner of the folder)", data.display()),
            source,
        }),
        _ => match folder::find_creation_evidence(&store) {
            Ok(Some(evidence)) => {
                let (path, made) = (store.display().to_string(), evidence.display().to_string());
                Err(StoreError::Gone { path, made }.into())
            }
            _ => Err(TransferError::NoStore { path: state_dir.display().to_string() }),
        },
    }
}

fn parse(lines: &mut dyn BufRead) -> Result<Vec<Record>, TransferError> {
    let mut number = 0;
    let mut read_line = |text: &mut Vec<u8>| -> Result<(usize, bool), TransferError> {
        number += 1;
        text.clear();
        let line_error = |what: String| TransferError::Line { number, what };
        let mut limited = lines.take(LINE_BYTES_MAX);
        limited.read_until(b'\n', text).map_err(|e| line_error(e.to_string()))?;
        if text.len() as u64 == LINE_BYTES_MAX {
            return Err(line_error(format!("longer than {LINE_BYTES_MAX} bytes")));
        }
        Ok((number, !text.is_empty()))
    };
    let mut text = Vec::new();
    read_line(&mut text)?;
    let line_error = |number, what: String| TransferError::Line { number, what };
    let header: Header = serde_json::from_slice(&text)
        .map_err(|e| line_error(1, format!("not the first line of `berth state export`: {e}")))?;
    if header.berth_state != LINES_FORMAT || header.record_format > FORMAT {
        let Header { berth_state, record_format, .. } = header;
        let what =
            format!("format {berth_state}/{record_format} is of a newer berth: import it with that release");
        return Err(line_error(1, what));
    }
    let mut records: Vec<Record> = Vec::new();
    loop {
        let (number, has_line) = read_line(&mut text)?;
        if !has_line {
            break;
        }
        let record = parse_record(&text, header.record_format).map_err(|what| line_error(number, what))?;
        if records.last().is_some_and(|last| last.key() >= record.key()) {
            return Err(line_error(number, "out of order, or a repeated record".into()));
        }
        records.push(record);
    }
    if records.len() != header.records {
        let what = format!("the file ends after {} of {} records", records.len(), header.records);
        return Err(line_error(records.len() + 2, what));
    }
    if !matches!(records.first(), Some(Record::Meta(_))) {
        return Err(line_error(2, "the record `meta` is missing".into()));
    }
    Ok(records)
}

fn parse_record(line: &[u8], format: u8) -> Result<Record, String> {
    let line: Line = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    let key = join_key(&line.kind, line.name.as_deref())?;
    let value = [&[format], line.value.get().as_bytes()].concat();
    codec::decode(&codec::key_bytes(&key), &value).map_err(|e| match e {
        DecodeError::Newer(found) => format!("format {found}"),
        DecodeError::Malformed(what) => what,
    })
}

/// A key's kind and name.
fn split_key(key: &RecordKey) -> (&'static str, Option<String>) {
    match key {
        RecordKey::Meta => ("meta", None),
        RecordKey::Part(id) => ("part", Some(id.to_string())),
        RecordKey::Marks(gpu) => ("drain", Some(gpu.to_string())),
        RecordKey::Via(gpu) => ("via", Some(gpu.to_string())),
        RecordKey::Allocation(id) => ("allocation", Some(id.to_string())),
        RecordKey::Policy(digest) => ("policy", Some(digest.as_str().to_owned())),
        RecordKey::Health(gpu) => ("health", Some(gpu.to_string())),
        RecordKey::Stack => ("stack", None),
        RecordKey::StackEntry(i) => ("stackEntry", Some(i.to_string())),
        RecordKey::PastStack(revision) => ("pastStack", Some(revision.to_string())),
        RecordKey::PastStackEntry(revision, i) => ("pastStackEntry", Some(format!("{revision}/{i}"))),
    }
}

/// The key of a kind and a name.
fn join_key(kind: &str, name: Option<&str>) -> Result<RecordKey, String> {
    let named = || name.ok_or_else(|| format!("a record of kind {kind} must have a name"));
    let part = || PartId::parse(named()?).map_err(|e| e.to_string());
    let gpu = || GpuId::parse(named()?).map_err(|e| e.to_string());
    Ok(match kind {
        "meta" => RecordKey::Meta,
        "part" => RecordKey::Part(part()?),
        "drain" => RecordKey::Marks(gpu()?),
        "via" => RecordKey::Via(gpu()?),
        "health" => RecordKey::Health(gpu()?),
        "allocation" => RecordKey::Allocation(AllocationId::parse(named()?).map_err(|e| e.to_string())?),
        "policy" => RecordKey::Policy(Digest::parse(named()?).map_err(|e| e.to_string())?),
        "stack" => RecordKey::Stack,
        "stackEntry" => RecordKey::StackEntry(named()?.parse().map_err(|e| format!("{e}"))?),
        "pastStack" => RecordKey::PastStack(named()?.parse().map_err(|e| format!("{e}"))?),
        "pastStackEntry" => {
            let name = named()?;
            let (revision, i) =
                name.split_once('/').ok_or("the name of a pastStackEntry must be REVISION/INDEX")?;
            let revision = revision.parse().map_err(|e| format!("{e}"))?;
            RecordKey::PastStackEntry(revision, i.parse().map_err(|e| format!("{e}"))?)
        }
        other => return Err(format!("unknown record kind {other}")),
    })
}
