//! A compiler of policies that stores its replies: hundreds of tests start a daemon with one of a few policies, and a
//! compilation takes longer than everything else that most of these tests do.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

/// The environment variable that names the compiler which a debug build of `berth` uses.
pub(crate) const VARIABLE: &str = "BERTH_TEST_COMPILER";
/// The compiler's replies are kept for a day, since no run of the tests takes longer.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The program. It stores replies of this build of `berth` only, for this and later runs of the tests.
pub(crate) fn kept_compiler() -> &'static Path {
    static PROGRAM: OnceLock<PathBuf> = OnceLock::new();
    PROGRAM.get_or_init(|| {
        let berth = fs::metadata(env!("CARGO_BIN_EXE_berth")).unwrap();
        let build = format!("compiled-{}-{}-{}", berth.len(), berth.mtime(), berth.mtime_nsec());
        let all = Path::new(env!("CARGO_TARGET_TMPDIR"));
        let own = all.join(build);
        fs::create_dir_all(own.join("kept")).unwrap();
        let program = own.join("compiler");
        // Links are used instead of copies: a file that was just written may still be open in a child process of
        // another test, and then it cannot be run.
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../..", "/tests/it/support/kept-compiler.sh");
        for (original, link) in [(script, &program), (env!("CARGO_BIN_EXE_berth"), &own.join("berth"))] {
            match symlink(original, link) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                linked => linked.unwrap(),
            }
        }
        delete_old(all, &own);
        program
    })
}

/// Deletes the folders of builds that last changed over a day ago. Another run may do the same at the same time.
fn delete_old(all: &Path, own: &Path) {
    for other in fs::read_dir(all).unwrap().flatten() {
        let age = || other.metadata().ok()?.modified().ok()?.elapsed().ok();
        let is_other = other.path() != own && other.file_name().to_string_lossy().starts_with("compiled-");
        if is_other && age().is_some_and(|age| age > KEPT) {
            let _ = fs::remove_dir_all(other.path());
        }
    }
}
