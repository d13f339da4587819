//! The check record: the expected contents of the store, written with every append.
//!
//! sled truncates its log at the first message that it cannot read, and after a crash may skip the
//! rest of a broken segment, in both cases without an error. So each append also writes the number
//! of appends, the number of records and the sum of their digests. A lost, outdated or changed
//! record makes the sum differ; a lost end of the log makes the number of appends smaller than the
//! one in [`super::counter`].

use super::codec::{self, Changes, DecodeError, FORMAT, split_format};
use berth_kernel::node::record::Record;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;

/// The check record's key: sorts before every [`berth_kernel::node::record::RecordKey`].
pub(super) const CHECK_KEY: &[u8] = &[0];

/// Most records for which memory is reserved in advance: a damaged count must not allocate more.
const RECORDS_RESERVED_MAX: usize = 16_384;

/// The check record; see the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Check {
    /// Appends so far, including the one that created the store.
    pub(super) writes: u64,
    /// Records, without this one.
    pub(super) records: u64,
    /// Sum of their digests, modulo 2^64.
    pub(super) sum: u64,
}

impl Check {
    /// Decodes the check record's value.
    ///
    /// # Errors
    /// If a later release wrote it, or it is malformed.
    pub(super) fn read(value: &[u8]) -> Result<Self, DecodeError> {
        let (_, body) = split_format(CHECK_KEY, value)?;
        codec::parse_json(body).map_err(|e| DecodeError::Malformed(format!("its check record: {e}")))
    }

    /// The encoded value of the check record.
    pub(super) fn value(&self) -> Vec<u8> {
        codec::encode_json(self)
    }
}

/// The digests of all records in the store, from which the next check record is computed.
#[derive(Debug, Default)]
pub(super) struct Contents {
    digests: BTreeMap<Box<[u8]>, u64>,
    check: Check,
    is_outdated: bool,
    bytes_read: usize,
}

/// The change of [`Contents`] by an append that is not yet durable.
#[derive(Debug)]
pub(super) struct PendingAppend {
    /// The check record to write with it.
    pub(super) check: Check,
    digests: Vec<(Vec<u8>, Option<u64>)>,
}

impl Contents {
    /// The current check record.
    pub(super) fn check(&self) -> Check {
        self.check
    }

    /// Whether any record is of an older format than [`FORMAT`].
    pub(super) fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// Size of all records, keys and values, when they were read, in bytes.
    pub(super) fn bytes_read(&self) -> usize {
        self.bytes_read
    }

    /// Computes the contents after an append of these changes.
    pub(super) fn prepare(&self, changes: &Changes) -> PendingAppend {
        let mut check = self.check;
        check.writes += 1;
        let mut digests = Vec::with_capacity(changes.len());
        for (key, value) in changes {
            if let Some(old) = self.digests.get(key.as_slice()) {
                check.records -= 1;
                check.sum = check.sum.wrapping_sub(*old);
            }
            let new = value.as_ref().map(|value| digest(key, value));
            if let Some(new) = new {
                check.records += 1;
                check.sum = check.sum.wrapping_add(new);
            }
            digests.push((key.clone(), new));
        }
        PendingAppend { check, digests }
    }

    /// Applies an append that is durable now.
    pub(super) fn commit(&mut self, append: PendingAppend) {
        self.check = append.check;
        for (key, digest) in append.digests {
            match digest {
                Some(digest) => self.digests.insert(key.into(), digest),
                None => self.digests.remove(key.as_slice()),
            };
        }
    }

    /// Decodes and verifies all pairs of a store, given in the order of their keys.
    ///
    /// # Errors
    /// If a pair is missing, added, outdated or malformed.
    pub(super) fn read<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<(Self, Vec<Record>), DecodeError> {
        let malformed = |what: &str| Err(DecodeError::Malformed(what.to_owned()));
        let mut pairs = pairs.into_iter();
        let Some((key, value)) = pairs.next() else {
            return malformed("it is empty, although it was created with two records");
        };
        if key.as_ref() != CHECK_KEY {
            return malformed("its check record is missing");
        }
        let expected = Check::read(value.as_ref())?;
        let is_outdated = value.as_ref().first() != Some(&FORMAT);
        let mut contents = Self { is_outdated, ..Self::default() };
        let capacity = usize::try_from(expected.records).unwrap_or(0).min(RECORDS_RESERVED_MAX);
        let (mut records, mut digests) = (Vec::with_capacity(capacity), Vec::with_capacity(capacity));
        for (key, value) in pairs {
            let (key, value) = (key.as_ref(), value.as_ref());
            contents.is_outdated |= value.first() != Some(&FORMAT);
            contents.bytes_read += key.len() + value.len();
            records.push(codec::decode(key, value)?);
            let digest = digest(key, value);
            digests.push(digest);
            contents.check.sum = contents.check.sum.wrapping_add(digest);
            contents.check.records += 1;
        }
        // Allocated after the loop: these keys live as long as the store, and between short-lived
        // buffers each would keep a page of the heap in use.
        let keys = records.iter().map(|record| codec::key_bytes(&record.key()).into());
        contents.digests = keys.zip(digests).collect();
        contents.check.writes = expected.writes;
        if contents.check == expected {
            return Ok((contents, records));
        }
        let (found, expected) = (contents.check.records, expected.records);
        malformed(&if found == expected {
            format!("some of its {found} records are not as they were last written")
        } else {
            format!("it should hold {expected} records and holds {found}")
        })
    }
}

/// The first eight bytes of sha256 over a constant, the key's length, the key and the value.
fn digest(key: &[u8], value: &[u8]) -> u64 {
    let mut sha = Sha256::new();
    // Part of every format so far.
    sha.update([1]);
    sha.update((key.len() as u64).to_le_bytes());
    sha.update(key);
    sha.update(value);
    let bytes: [u8; 32] = sha.finalize().into();
    let mut first = [0; 8];
    first.copy_from_slice(&bytes[..8]);
    u64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::node::record::{Meta, Record, StackHead};
    use berth_kernel::policy::stack::StackOrigin;

    type Pair = (Vec<u8>, Vec<u8>);

    fn meta(next_number: u64) -> Pair {
        let record = Record::Meta(Meta { store: 7, next_number, kubelet_seen_wall_ms: None });
        pair(&record)
    }

    fn stack() -> Pair {
        pair(&Record::Stack(StackHead {
            revision: 1,
            origin: StackOrigin::File,
            failed: None,
            by: "config".into(),
            why: String::new(),
            since_wall_ms: 5,
            entries: 0,
        }))
    }

    fn pair(record: &Record) -> Pair {
        (codec::key_bytes(&record.key()), codec::encode(record).unwrap())
    }

    fn stored(check: Check, pairs: &[Pair]) -> Vec<Pair> {
        let mut stored = vec![(CHECK_KEY.to_vec(), check.value())];
        stored.extend_from_slice(pairs);
        stored
    }

    fn put(pair: &Pair) -> (Vec<u8>, Option<Vec<u8>>) {
        (pair.0.clone(), Some(pair.1.clone()))
    }

    fn append(contents: &mut Contents, changes: &Changes) {
        contents.commit(contents.prepare(changes));
    }

    #[test]
    fn appended_records_are_read_back() {
        let mut contents = Contents::default();
        append(&mut contents, &Changes::from([put(&meta(1)), put(&stack())]));
        append(&mut contents, &Changes::from([put(&meta(2))]));
        append(&mut contents, &Changes::from([(stack().0, None)]));
        let (read, records) = Contents::read(stored(contents.check(), &[meta(2)])).unwrap();
        assert_eq!(read.check(), contents.check());
        assert_eq!((read.check().writes, read.check().records), (3, 1));
        assert_eq!(records.len(), 1);
    }

    /// Stores on nodes have this form, as with the golden records of `codec`.
    #[test]
    fn golden_checks() {
        let of_format = |format: u8| {
            let mut contents = Contents::default();
            let pairs = [meta(2), stack()].map(|(key, value)| (key, [&[format], &value[1..]].concat()));
            append(&mut contents, &pairs.iter().map(put).collect());
            (contents.check(), pairs)
        };
        let (check, _) = of_format(3);
        assert_eq!(check.value(), b"\x03{\"writes\":1,\"records\":2,\"sum\":1654622555644469749}");
        let (check, pairs) = of_format(1);
        let mut stored = stored(check, &pairs);
        stored[0].1 = b"\x01{\"writes\":1,\"records\":2,\"sum\":1495630016805505590}".to_vec();
        let (read, _) = Contents::read(stored).unwrap();
        assert!(read.is_outdated());
        // An upgrade that was interrupted leaves records of both formats.
        let mut contents = Contents::default();
        append(&mut contents, &Changes::from([put(&pairs[0]), put(&stack())]));
        let mixed = vec![(CHECK_KEY.to_vec(), contents.check().value()), pairs[0].clone(), stack()];
        assert!(Contents::read(mixed).unwrap().0.is_outdated());
    }

    #[test]
    fn missing_and_outdated_records_are_detected() {
        let mut contents = Contents::default();
        append(&mut contents, &Changes::from([put(&meta(2)), put(&stack())]));
        let check = contents.check();
        for wrong in [
            stored(check, &[meta(2)]),
            stored(check, &[meta(1), stack()]),
            vec![meta(2), stack()],
            Vec::new(),
        ] {
            assert!(matches!(Contents::read(wrong.clone()), Err(DecodeError::Malformed(_))), "{wrong:?}");
        }
        assert!(Contents::read(stored(check, &[meta(2), stack()])).is_ok());
    }
}
