//! A test that runs itself again in a process of its own, such as on a disk that only this process sees.

/// The arguments by which this program runs only one test: that with this name in the module `module_path!()`.
pub(crate) fn only(module: &str, test: &str) -> [String; 4] {
    // `it::store::crash`: the harness names tests without the crate.
    let (_crate, module) = module.split_once("::").unwrap();
    ["--exact".into(), format!("{module}::{test}"), "--nocapture".into(), "--test-threads=1".into()]
}

/// Whether the output of such a process says that its test ran: with a wrong name none runs, which is no failure.
pub(crate) fn has_run(stdout: &[u8]) -> bool {
    String::from_utf8_lossy(stdout).contains("1 passed")
}
