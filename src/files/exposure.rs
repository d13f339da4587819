//! Files and folders that others than the daemon's user and root can change or read.

use std::fs::Metadata;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// The mode bits with which others can change a file or folder.
pub const WRITABLE_BY_OTHERS: u32 = 0o022;
/// The mode bits with which others can change or read a file.
pub const USABLE_BY_OTHERS: u32 = 0o066;

/// A way in which others can use a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposure {
    /// What is wrong, with the path.
    pub what: String,
    /// The command that mends it.
    pub fix: String,
}

/// The ways in which others can use this file or folder: another owner than root or the process's user, and these mode
/// bits.
#[must_use]
pub fn exposures(path: &Path, about: &Metadata, mode_bits: u32) -> Vec<Exposure> {
    exposures_for(path, about, mode_bits, rustix::process::geteuid().as_raw())
}

fn exposures_for(path: &Path, about: &Metadata, mode_bits: u32, user: u32) -> Vec<Exposure> {
    let shown = path.display();
    let mut found = Vec::new();
    let owner = about.uid();
    if owner != 0 && owner != user {
        let what = format!("{shown} belongs to user {owner}, who can change it");
        found.push(Exposure { what, fix: format!("chown {user} {shown}") });
    }
    let mode = about.permissions().mode() & 0o7777;
    if mode & mode_bits != 0 {
        let can = if mode & WRITABLE_BY_OTHERS != 0 { "changed" } else { "read" };
        let bits = if mode_bits == WRITABLE_BY_OTHERS { "go-w" } else { "go-rw" };
        let what = format!("{shown} can be {can} by other users (mode {mode:o})");
        found.push(Exposure { what, fix: format!("chmod {bits} {shown}") });
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};

    #[test]
    fn another_owner_and_open_modes_are_found_with_the_command_that_mends_them() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        fs::write(&path, "").unwrap();
        let found = |mode: u32, bits: u32, user: u32| {
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let all = exposures_for(&path, &fs::metadata(&path).unwrap(), bits, user);
            all.into_iter().map(|one| one.fix.replace(&path.display().to_string(), "P")).collect::<Vec<_>>()
        };
        let own = fs::metadata(&path).unwrap().uid();
        assert_eq!(found(0o600, USABLE_BY_OTHERS, own), [""; 0]);
        assert_eq!(found(0o640, USABLE_BY_OTHERS, own), ["chmod go-rw P"]);
        assert_eq!(found(0o755, WRITABLE_BY_OTHERS, own), [""; 0]);
        assert_eq!(found(0o777, WRITABLE_BY_OTHERS, own), ["chmod go-w P"]);
        // Root may own every file; no test can make it the owner without being root.
        let other = if own == 0 { vec![] } else { vec!["chown 4711 P".to_owned()] };
        assert_eq!(found(0o600, USABLE_BY_OTHERS, 4711), other);
        let status = std::process::Command::new("sh")
            .arg("-c")
            .arg(format!("chmod go-rw {}", path.display()))
            .status();
        assert!(status.unwrap().success());
    }
}
