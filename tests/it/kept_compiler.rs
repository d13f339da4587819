//! A compiler of policies that remembers: hundreds of tests start a daemon with one of a few policies, and a compilation
//! takes longer than everything else that most of them do.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The variable by which a debug build of `berth` is given its compiler.
pub(crate) const VARIABLE: &str = "BERTH_TEST_COMPILER";
/// The replies to a build are kept for a day: no run takes longer.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The program. What it keeps is of this build of `berth`, and for this and later runs.
pub(crate) fn kept_compiler() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let berth = fs::metadata(env!("CARGO_BIN_EXE_berth")).unwrap();
        let build = format!("compiled-{}-{}-{}", berth.len(), berth.mtime(), berth.mtime_nsec());
        let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let own = all.join(build);
        fs::create_dir_all(own.join("kept")).unwrap();
        let program = own.join("compiler");
        // Links, and no copies: a file that was written just now may still be open in another test's child, and cannot be
        // run then.
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../..", "/tests/it/kept-compiler.sh");
        for (original, link) in [(script, &program), (env!("CARGO_BIN_EXE_berth"), &own.join("berth"))] {
            match symlink(original, link) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                linked => linked.unwrap(),
            }
        }
        delete_old(all);
        program
    })
}

/// Deletes what builds of earlier days left. Another run may do the same.
fn delete_old(all: &Path) {
    for other in fs::read_dir(all).unwrap().flatten() {
        let age = || other.metadata().ok()?.modified().ok()?.elapsed().ok();
        if other.file_name().to_string_lossy().starts_with("compiled-") && age().is_some_and(|age| age > KEPT)
        {
            let _ = fs::remove_dir_all(other.path());
        }
    }
}
