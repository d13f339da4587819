//! What a disk may hold after a power cut.
//!
//! The model, which is what Linux promises on a journaling file system (ext4 `data=ordered`, XFS,
//! btrfs) with write barriers, and no more:
//!
//! - A write goes into the page cache. From then on the system may bring any sector of it (512 bytes)
//!   to the disk at any time, in any order, each as it is at that moment; or not. So after a cut each
//!   sector of a file is as it was when last synced, or as after any one write since. A sector
//!   is whole; a write of several is not.
//! - `sync_file_range` promises nothing: it waits for writes, but neither for the drive's cache
//!   nor for the file's new length or blocks. It is not even noted.
//! - A file's length is metadata of its own: after a cut it is what it was when last synced, or what
//!   it was after any change since, whether or not the data arrived. What never arrived reads as zeros.
//! - `fdatasync` and `fsync` that came back with success: the file's data and length as of then are
//!   there after any cut.
//! - A name (made, renamed, removed) is in its folder. Changes of one folder reach the disk in order,
//!   since they are in one journal, so after a cut the first n of those since the folder's last
//!   `fsync` are there, for any n. Folders are independent of each other here, which is weaker than one
//!   journal. A rename is whole.
//! - `fsync` of a folder: its names as of then are there. `fsync` of a file says nothing about its
//!   name, although ext4 and XFS bring that along. That a rename waits for the data of what is
//!   renamed is not assumed either (ext4's `auto_da_alloc`).
//!
//! Not modelled: a drive that lies about its cache, bits that rot, stale blocks of other files (the
//! file systems above zero them), more than one disk.

use super::recorder::{Id, Op, ROOT};
use harness::kill::Rng;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::{fs, io};

/// What the drive writes as one, bytes.
const SECTOR: usize = 512;

/// A file's bytes: those synced, and what was done since.
#[derive(Clone, Debug, Default)]
struct Content {
    synced: Vec<u8>,
    since: Vec<Change>,
}

#[derive(Clone, Debug)]
enum Change {
    Bytes { at: usize, bytes: Vec<u8> },
    Len(usize),
}

/// A folder's names: those synced, and what was done since.
#[derive(Clone, Debug, Default)]
struct Names {
    synced: BTreeMap<String, Id>,
    since: Vec<Naming>,
}

#[derive(Clone, Debug)]
enum Naming {
    Add(String, Id),
    Rename(String, String),
    Remove(String),
}

/// Everything below the recorded folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Disk {
    files: BTreeMap<Id, Content>,
    folders: BTreeMap<Id, Names>,
}

/// How much of what was not synced is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Loss {
    /// All of it: what `kill -9` leaves.
    Nothing,
    /// Nothing of it.
    Everything,
    /// Sectors, lengths and names by chance, each by itself.
    Any,
    /// The same, but what a file has is the work of its first so many writes.
    Latest,
}

impl Disk {
    /// An empty folder.
    pub(crate) fn new() -> Self {
        Self { files: BTreeMap::new(), folders: BTreeMap::from([(ROOT, Names::default())]) }
    }

    /// Advances by one step.
    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Made { folder, name, id, is_folder } => {
                if *is_folder {
                    self.folders.insert(*id, Names::default());
                } else {
                    self.files.insert(*id, Content::default());
                }
                self.naming(*folder, Naming::Add(name.clone(), *id));
            }
            Op::Written { id, at, bytes } => {
                let change = Change::Bytes { at: length(*at), bytes: bytes.clone() };
                self.files.entry(*id).or_default().since.push(change);
            }
            Op::Cut { id, len } => {
                self.files.entry(*id).or_default().since.push(Change::Len(length(*len)));
            }
            Op::Synced { id } => {
                if let Some(names) = self.folders.get_mut(id) {
                    names.synced = names.after(names.since.len());
                    names.since.clear();
                } else if let Some(content) = self.files.get_mut(id) {
                    content.synced = content.after(content.since.len());
                    content.since.clear();
                }
            }
            Op::Renamed { folder, from, to } => {
                self.naming(*folder, Naming::Rename(from.clone(), to.clone()));
            }
            Op::Removed { folder, name } => self.naming(*folder, Naming::Remove(name.clone())),
            Op::Acknowledged(_) => {}
        }
    }

    fn naming(&mut self, folder: Id, naming: Naming) {
        self.folders.entry(folder).or_default().since.push(naming);
    }

    /// One of the disks that a power cut now may leave. What it leaves counts as synced, since it was read from a disk.
    /// [`Loss::Nothing`] is a killed process instead of a power cut: what was not synced stays so, and a later cut may
    /// lose it.
    pub(crate) fn cut(&self, loss: Loss, rng: &mut Rng) -> Self {
        let files = self.files.iter().map(|(id, content)| (*id, content.cut(loss, rng))).collect();
        let folders = self.folders.iter().map(|(id, names)| {
            let kept = match loss {
                Loss::Nothing => return (*id, names.clone()),
                Loss::Everything => 0,
                Loss::Any | Loss::Latest => upto(names.since.len(), rng),
            };
            (*id, Names { synced: names.after(kept), since: Vec::new() })
        });
        Self { files, folders: folders.collect() }
    }

    /// Writes it out below `root`, an empty folder, and says which path is what.
    pub(crate) fn write(&self, root: &Path) -> io::Result<Vec<(PathBuf, Id)>> {
        let mut made = vec![(root.to_owned(), ROOT)];
        let mut next = 0;
        while let Some((path, id)) = made.get(next).cloned() {
            next += 1;
            let Some(names) = self.folders.get(&id) else { continue };
            for (name, child) in &names.after(names.since.len()) {
                let path = path.join(name);
                match self.files.get(child) {
                    Some(content) => fs::write(&path, content.after(content.since.len()))?,
                    None => fs::create_dir(&path)?,
                }
                made.push((path, *child));
            }
        }
        Ok(made)
    }

    /// Every file by its path, with its bytes, and every folder, as a program sees them now.
    pub(crate) fn seen(&self) -> BTreeMap<PathBuf, Option<Vec<u8>>> {
        let mut found = BTreeMap::new();
        let mut open = vec![(PathBuf::new(), ROOT)];
        while let Some((path, id)) = open.pop() {
            let Some(names) = self.folders.get(&id) else { continue };
            for (name, child) in &names.after(names.since.len()) {
                let path = path.join(name);
                let bytes = self.files.get(child).map(|c| c.after(c.since.len()));
                if bytes.is_none() {
                    open.push((path.clone(), *child));
                }
                found.insert(path, bytes);
            }
        }
        found
    }
}

impl Content {
    /// With the first `kept` changes.
    fn after(&self, kept: usize) -> Vec<u8> {
        let mut bytes = self.synced.clone();
        for change in &self.since[..kept] {
            match change {
                Change::Len(len) => bytes.resize(*len, 0),
                Change::Bytes { at, bytes: new } => {
                    let end = at + new.len();
                    if bytes.len() < end {
                        bytes.resize(end, 0);
                    }
                    bytes[*at..end].copy_from_slice(new);
                }
            }
        }
        bytes
    }

    fn cut(&self, loss: Loss, rng: &mut Rng) -> Self {
        let synced = match loss {
            Loss::Nothing => return self.clone(),
            Loss::Everything => self.synced.clone(),
            Loss::Latest => self.after(upto(self.since.len(), rng)),
            Loss::Any if self.since.is_empty() => self.synced.clone(),
            Loss::Any => self.scattered(rng),
        };
        Self { synced, since: Vec::new() }
    }

    /// Each sector, and the length, as after any of the changes.
    fn scattered(&self, rng: &mut Rng) -> Vec<u8> {
        let mut bytes = self.synced.clone();
        let len = self.after(upto(self.since.len(), rng)).len();
        let end = self.since.iter().map(|c| match c {
            Change::Len(len) => *len,
            Change::Bytes { at, bytes } => at + bytes.len(),
        });
        bytes.resize(end.max().unwrap_or(0).max(bytes.len()).max(len), 0);
        let sectors = bytes.len().div_ceil(SECTOR);
        let touched = |sector: usize, change: &Change| match change {
            // What a cut leaves out reads as zeros if the file grows again; see `after`.
            Change::Len(len) => *len < (sector + 1) * SECTOR,
            Change::Bytes { at, bytes } => *at < (sector + 1) * SECTOR && at + bytes.len() > sector * SECTOR,
        };
        for sector in 0..sectors {
            let changes: Vec<_> = self.since.iter().filter(|c| touched(sector, c)).collect();
            if changes.is_empty() {
                continue;
            }
            let (from, to) = (sector * SECTOR, ((sector + 1) * SECTOR).min(bytes.len()));
            for change in &changes[..upto(changes.len(), rng)] {
                match change {
                    Change::Len(len) => bytes[to.min(from.max(*len))..to].fill(0),
                    Change::Bytes { at, bytes: new } => {
                        let (first, last) = (from.max(*at), to.min(at + new.len()));
                        bytes[first..last].copy_from_slice(&new[first - at..last - at]);
                    }
                }
            }
        }
        bytes.resize(len, 0);
        bytes
    }
}

impl Names {
    /// With the first `kept` changes.
    fn after(&self, kept: usize) -> BTreeMap<String, Id> {
        let mut names = self.synced.clone();
        for naming in &self.since[..kept] {
            match naming {
                Naming::Add(name, id) => {
                    names.insert(name.clone(), *id);
                }
                Naming::Rename(from, to) => {
                    if let Some(id) = names.remove(from) {
                        names.insert(to.clone(), id);
                    }
                }
                Naming::Remove(name) => {
                    names.remove(name);
                }
            }
        }
        names
    }
}

/// From none to all.
fn upto(all: usize, rng: &mut Rng) -> usize {
    usize::try_from(rng.below(all as u64 + 1)).unwrap_or(all)
}

/// Offsets of files in memory.
fn length(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(id: Id, at: u64, bytes: &[u8]) -> Op {
        Op::Written { id, at, bytes: bytes.to_vec() }
    }

    fn made(name: &str, id: Id) -> Op {
        Op::Made { folder: ROOT, name: name.into(), id, is_folder: false }
    }

    #[test]
    fn synced_writes_are_in_every_disk_and_others_may_be_torn() {
        let mut disk = Disk::new();
        let (old, new) = (vec![1; 4 * SECTOR], vec![2; 4 * SECTOR]);
        for op in [made("f", 1), written(1, 0, &old), Op::Synced { id: 1 }, Op::Synced { id: ROOT }] {
            disk.apply(&op);
        }
        disk.apply(&written(1, 0, &new));
        let mut rng = Rng::new(1);
        let mut torn = false;
        for _ in 0..200 {
            let bytes = disk.cut(Loss::Any, &mut rng).seen()[Path::new("f")].clone().unwrap();
            assert_eq!(bytes.len(), 4 * SECTOR);
            for sector in bytes.chunks(SECTOR) {
                assert!(sector.iter().all(|b| *b == sector[0]), "a sector is whole");
            }
            torn |= bytes != old && bytes != new;
        }
        assert!(torn);
        assert_eq!(disk.cut(Loss::Everything, &mut rng).seen()[Path::new("f")], Some(old));
        assert_eq!(disk.cut(Loss::Nothing, &mut rng).seen()[Path::new("f")], Some(new));
    }

    #[test]
    fn names_arrive_in_order_and_without_their_data() {
        let mut disk = Disk::new();
        for op in [made("a", 1), written(1, 0, b"text"), made("b", 2)] {
            disk.apply(&op);
        }
        disk.apply(&Op::Renamed { folder: ROOT, from: "a".into(), to: "c".into() });
        let mut rng = Rng::new(2);
        let mut met = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let seen = disk.cut(Loss::Any, &mut rng).seen();
            let names: Vec<_> = seen.keys().map(|p| p.to_str().unwrap().to_owned()).collect();
            let empty = seen.get(Path::new("c")).is_some_and(|c| c.as_deref() == Some(b""));
            met.insert((names.join(" "), empty));
        }
        let names: std::collections::BTreeSet<_> = met.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names.into_iter().collect::<Vec<_>>(), ["", "a", "a b", "b c"]);
        assert!(met.contains(&("b c".into(), true)), "a renamed file may be empty");
    }
}
