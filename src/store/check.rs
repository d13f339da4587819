//! The check record: what the store should hold, written with every append.
//!
//! sled cuts its log at the first message that it cannot read, and after a crash may skip the rest
//! of a broken segment, without a word in both cases. So each append also writes how many appends
//! there were, how many records there are, and the sum of their digests. A record that is lost,
//! old or changed makes the sum differ; an end of the log that is lost makes the count smaller than
//! the one in [`super::counter`].

use super::codec::{self, DecodeError, FORMAT, versioned};
use berth_kernel::record::Record;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;

/// The check record's key: sorts before every [`berth_kernel::record::RecordKey`].
pub(super) const CHECK_KEY: &[u8] = &[0];

/// Records that room is made for at once; what a damaged count asks for must not cost memory.
const RECORDS_USUAL: usize = 16_384;

/// What an append makes of each key it names: a value, or nothing.
pub(super) type Changes = BTreeMap<Vec<u8>, Option<Vec<u8>>>;

/// See the module.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Check {
    /// Appends so far, the making of the store among them.
    pub(super) writes: u64,
    /// Records, this one not counted.
    pub(super) records: u64,
    /// Sum of their digests, modulo 2^64.
    pub(super) sum: u64,
}

impl Check {
    /// Reads the check record's value.
    ///
    /// # Errors
    /// If it is of a later release, or none.
    pub(super) fn read(value: &[u8]) -> Result<Self, DecodeError> {
        let body = versioned(CHECK_KEY, value)?;
        codec::parse(body).map_err(|e| DecodeError::Malformed(format!("its check record: {e}")))
    }

    /// The check record's value.
    pub(super) fn value(&self) -> Vec<u8> {
        codec::json(self)
    }
}

/// Everything the store holds, in digests: what the next check record is made from.
#[derive(Debug, Default)]
pub(super) struct Contents {
    digests: BTreeMap<Box<[u8]>, u64>,
    check: Check,
}

/// The contents after an append that is not over.
#[derive(Debug)]
pub(super) struct Next {
    /// The check record that goes with it.
    pub(super) check: Check,
    digests: Vec<(Vec<u8>, Option<u64>)>,
}

impl Contents {
    /// The check record as of now.
    pub(super) fn check(&self) -> Check {
        self.check
    }

    /// What it holds with these changes.
    pub(super) fn next(&self, changes: &Changes) -> Next {
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
        Next { check, digests }
    }

    /// Takes changes that are durable now.
    pub(super) fn take(&mut self, next: Next) {
        self.check = next.check;
        for (key, digest) in next.digests {
            match digest {
                Some(digest) => self.digests.insert(key.into(), digest),
                None => self.digests.remove(key.as_slice()),
            };
        }
    }

    /// What these pairs, read from a store in the order of their keys, hold.
    ///
    /// # Errors
    /// If they are not what was written, each and all; the text says what is wrong.
    pub(super) fn read<K: AsRef<[u8]>, V: AsRef<[u8]>>(
        pairs: impl IntoIterator<Item = (K, V)>,
    ) -> Result<(Self, Vec<Record>), DecodeError> {
        let malformed = |what: &str| Err(DecodeError::Malformed(what.to_owned()));
        let mut pairs = pairs.into_iter();
        let Some((key, value)) = pairs.next() else {
            return malformed("it is empty, although it was made with two records");
        };
        if key.as_ref() != CHECK_KEY {
            return malformed("its check record is gone");
        }
        let wanted = Check::read(value.as_ref())?;
        let mut contents = Self::default();
        let room = usize::try_from(wanted.records).unwrap_or(0).min(RECORDS_USUAL);
        let (mut records, mut digests) = (Vec::with_capacity(room), Vec::with_capacity(room));
        for (key, value) in pairs {
            let (key, value) = (key.as_ref(), value.as_ref());
            records.push(codec::decode(key, value)?);
            let digest = digest(key, value);
            digests.push(digest);
            contents.check.sum = contents.check.sum.wrapping_add(digest);
            contents.check.records += 1;
        }
        // Only now: what is kept for good would lie between pieces of records that are not, and keep
        // a page of the heap each.
        let keys = records.iter().map(|record| codec::key_bytes(&record.key()).into());
        contents.digests = keys.zip(digests).collect();
        contents.check.writes = wanted.writes;
        if contents.check == wanted {
            return Ok((contents, records));
        }
        let (found, wanted) = (contents.check.records, wanted.records);
        malformed(&if found == wanted {
            format!("of its {found} records some are not as they were written last")
        } else {
            format!("it should hold {wanted} records and shows {found}")
        })
    }
}

/// The first eight bytes of sha256 over the format, the key's length, the key and the value.
fn digest(key: &[u8], value: &[u8]) -> u64 {
    let mut sha = Sha256::new();
    sha.update([FORMAT]);
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
    use berth_kernel::record::{Meta, Record, StackHead};

    type Pair = (Vec<u8>, Vec<u8>);

    fn meta(next_number: u64) -> Pair {
        let record = Record::Meta(Meta { store: 7, next_number, kubelet_seen_wall_ms: None });
        pair(&record)
    }

    fn stack() -> Pair {
        pair(&Record::Stack(StackHead {
            revision: 1,
            from_api: false,
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
        let mut all = vec![(CHECK_KEY.to_vec(), check.value())];
        all.extend_from_slice(pairs);
        all
    }

    fn put(pair: &Pair) -> (Vec<u8>, Option<Vec<u8>>) {
        (pair.0.clone(), Some(pair.1.clone()))
    }

    fn take(contents: &mut Contents, changes: &Changes) {
        contents.take(contents.next(changes));
    }

    #[test]
    fn what_was_appended_is_what_is_read() {
        let mut contents = Contents::default();
        take(&mut contents, &Changes::from([put(&meta(1)), put(&stack())]));
        take(&mut contents, &Changes::from([put(&meta(2))]));
        take(&mut contents, &Changes::from([(stack().0, None)]));
        let (read, records) = Contents::read(stored(contents.check(), &[meta(2)])).unwrap();
        assert_eq!(read.check(), contents.check());
        assert_eq!((read.check().writes, read.check().records), (3, 1));
        assert_eq!(records.len(), 1);
    }

    /// As the golden records of `codec`: nodes hold this form.
    #[test]
    fn golden_check_of_format_1() {
        let mut contents = Contents::default();
        take(&mut contents, &Changes::from([put(&meta(2)), put(&stack())]));
        assert_eq!(contents.check().value(), b"\x01{\"writes\":1,\"records\":2,\"sum\":1495630016805505590}");
    }

    #[test]
    fn a_lost_an_old_and_an_added_record_are_found() {
        let mut contents = Contents::default();
        take(&mut contents, &Changes::from([put(&meta(2)), put(&stack())]));
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
