//! Inputs that the fuzz targets found (`just fuzz`), run again without a fuzzer.

use crate::support::guests::{installed, policies};
use harness::fuzz::{answer, lift, upload};
use std::path::Path;

/// Plays every input of a target's corpus.
fn replay(target: &str, play: impl Fn(&[u8])) {
    let folder =
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).join("tests/fuzz/corpus").join(target);
    let mut played = 0;
    for entry in std::fs::read_dir(&folder).unwrap() {
        play(&std::fs::read(entry.unwrap().path()).unwrap());
        played += 1;
    }
    assert!(played > 20, "{} holds {played} inputs", folder.display());
}

#[test]
fn no_answer_grants_unavailable_devices() {
    replay("answer", answer::run);
}

#[test]
fn no_guest_memory_is_read_beyond_its_limits() {
    let parrot = installed("parrot");
    replay("lift", |data| lift::run(policies(), &parrot, data));
}

#[test]
fn no_hostile_upload_has_another_effect_than_a_refusal() {
    replay("upload", |data| upload::run(policies(), data));
}
