//! The state folder: room, rights, the token, and whether another daemon has it.

use super::line::Line;
use super::running;
use crate::config::Config;
use rustix::fs::{Access, access, major, minor, statvfs};
use std::fs::{metadata, read_to_string};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

const CHECK: &str = "state folder";
/// Room below which the store and uploaded policies may soon not fit: the store is at most some
/// 20 MiB, a policy and what it is compiled to at most some 100 MiB.
const ROOM_BYTES_MIN: u64 = 256 * 1024 * 1024;
/// Room below which the daemon does not start, or not for long: an empty store takes 2 MiB, and it
/// grows by 2 MiB at a time.
const ROOM_BYTES_START: u64 = 4 * 1024 * 1024;
/// What to do where the folder cannot be used.
const ELSEWHERE: &str = "make it writable, or choose another with --state-dir";

pub(super) fn folder(config: &Config) -> Line {
    let path = &config.state_dir;
    let shown = path.display();
    // What is not there yet is made at the start, so what counts is the first folder that is there.
    let Some(there) = path.ancestors().find(|p| p.exists()) else {
        return Line::fail(CHECK, format!("{shown} cannot be looked at"), ELSEWHERE);
    };
    if !there.is_dir() {
        return Line::fail(CHECK, format!("{} is no folder", there.display()), ELSEWHERE);
    }
    if let Err(error) = access(there, Access::WRITE_OK | Access::EXEC_OK) {
        return Line::fail(CHECK, format!("{} is not writable: {error}", there.display()), ELSEWHERE);
    }
    let wrong = token(&config.token_file).or_else(|| gone(path)).or_else(|| in_use(config)).or_else(|| {
        let about = statvfs(there).ok()?;
        room(path, about.f_bavail.saturating_mul(about.f_frsize))
    });
    wrong.unwrap_or_else(|| match there == path {
        true => Line::ok(CHECK, format!("{shown} is there and writable")),
        false => Line::ok(CHECK, format!("{shown} will be made at the first start")),
    })
}

/// Only what is wrong with the token file.
fn token(path: &Path) -> Option<Line> {
    if let Err(error) = berth_http::check_token_file(path) {
        let fix = format!("mend {}, or delete it: the daemon makes a new one", path.display());
        return Some(Line::fail(CHECK, format!("{:#}", anyhow::Error::new(error)), fix));
    }
    let mode = metadata(path).ok()?.permissions().mode() & 0o777;
    let shown = path.display();
    (mode & 0o077 != 0).then(|| {
        let detail = format!("{shown} can be used by others (mode {mode:o})");
        Line::warn(CHECK, detail, format!("chmod 600 {shown}"))
    })
}

/// Only whether a store was made here and is gone.
fn gone(path: &Path) -> Option<Line> {
    (path.join("store.made").exists() && !path.join("store/data").exists()).then(|| {
        let detail = format!("the store in {} is missing, although one was created there", path.display());
        let fix =
            "put store/data back, or `berth state import FILE`; `berth state init` begins with an empty one";
        Line::fail(CHECK, detail, fix)
    })
}

/// Only whether a daemon other than the one that answers under this configuration has the store.
fn in_use(config: &Config) -> Option<Line> {
    let lock = metadata(config.state_dir.join("store/lock")).ok()?;
    let locks = read_to_string("/proc/locks").ok()?;
    if !is_locked(&locks, lock.dev(), lock.ino()) || running::answers(config) {
        return None;
    }
    let detail = format!("{} is in use by another process", config.state_dir.display());
    Some(Line::fail(CHECK, detail, "stop it, or choose another folder with --state-dir"))
}

/// Whether the system's list of locks has one on this file that shuts others out. Read rather than
/// tried, since a lock that is tried could hinder a daemon that starts just then.
fn is_locked(locks: &str, device: u64, inode: u64) -> bool {
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).any(|words| {
        words.get(1) == Some(&"FLOCK")
            && words.get(3) == Some(&"WRITE")
            && words.get(5) == Some(&file.as_str())
    })
}

/// Only what is wrong with the room that is left.
fn room(path: &Path, bytes: u64) -> Option<Line> {
    let fix = format!(
        "free some: {} MiB are enough; or choose another disk with --state-dir",
        ROOM_BYTES_MIN >> 20
    );
    let detail = format!("{} has {} MiB of room left", path.display(), bytes >> 20);
    if bytes < ROOM_BYTES_START {
        return Some(Line::fail(CHECK, detail + ", too little for the store", fix));
    }
    (bytes < ROOM_BYTES_MIN).then(|| Line::warn(CHECK, detail, fix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::node::line::Level;

    #[test]
    fn a_full_disk_fails_and_little_room_is_a_warning() {
        let level = |bytes| room(Path::new("/s"), bytes).map(|line| line.level);
        assert_eq!(level(0), Some(Level::Fail));
        assert_eq!(level(ROOM_BYTES_START - 1), Some(Level::Fail));
        assert_eq!(level(ROOM_BYTES_START), Some(Level::Warn));
        assert_eq!(level(ROOM_BYTES_MIN), None);
    }

    #[test]
    fn a_store_that_is_gone_fails_and_one_that_never_was_does_not() {
        let dir = tempfile::tempdir().unwrap();
        assert!(gone(dir.path()).is_none());
        std::fs::write(dir.path().join("store.made"), "").unwrap();
        assert_eq!(gone(dir.path()).map(|line| line.level), Some(Level::Fail));
        std::fs::create_dir_all(dir.path().join("store/data")).unwrap();
        assert!(gone(dir.path()).is_none());
    }

    #[test]
    fn locks_are_found_by_device_and_inode() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 fe:00:5 0 EOF\n2: FLOCK  ADVISORY  READ 7 fe:00:6 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 7 fe:00:7 0 EOF\n3: -> FLOCK  ADVISORY  WRITE 8 fe:00:9 0 EOF\n";
        let device = rustix::fs::makedev(0xfe, 0);
        let locked: Vec<_> = (5..10).filter(|inode| is_locked(locks, device, *inode)).collect();
        assert_eq!(locked, [7]);
        assert!(!is_locked(locks, rustix::fs::makedev(0xfd, 0), 7));
    }

    #[test]
    fn a_token_that_serve_would_refuse_fails() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        assert!(token(&path).is_none());
        let with = |text: &str, mode| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            token(&path).map(|line| line.level)
        };
        assert_eq!(with(&"0".repeat(64), 0o600), None);
        assert_eq!(with(&"0".repeat(64), 0o644), Some(Level::Warn));
        assert_eq!(with(&"0".repeat(64), 0o622), Some(Level::Fail));
        assert_eq!(with("short", 0o600), Some(Level::Fail));
    }
}
