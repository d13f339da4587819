//! Writes the inputs that the corpora began with: `seeds FOLDER`, one folder a target.

// A seed that cannot be written ends it.
#![allow(clippy::unwrap_used)]

use harness::hostile::table::guests;
use std::path::{Path, PathBuf};

/// Where the parrot's answer lies.
const AT: u32 = 0x800;

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("usage: seeds FOLDER"));
    let guests_at = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/guests");
    for file in std::fs::read_dir(guests_at).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        if let Some(name) = name.strip_suffix(".component.wat") {
            write(&folder, "upload", name, &guests::component(name));
        } else if let Some(name) = name.strip_suffix(".wat") {
            write(&folder, "upload", name, &guests::guest(name));
        }
    }
    write(&folder, "upload", "instances", &guests::instances(3));
    write(&folder, "upload", "nested", &guests::nested(20));
    for (name, answer) in answers() {
        write(&folder, "lift", name, &answer);
    }
    write(&folder, "answer", "nothing", &[]);
    let long: Vec<u8> = (0..=255).cycle().take(2_000).collect();
    write(&folder, "answer", "long", &long);
}

fn write(folder: &Path, target: &str, name: &str, bytes: &[u8]) {
    let folder = folder.join(target);
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join(name), bytes).unwrap();
}

/// The hook, and well-formed answers to it; a text or list lies behind the record that names it.
fn answers() -> Vec<(&'static str, Vec<u8>)> {
    let words = |hook: u8, words: &[u32], behind: &[u8]| {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes());
        [hook].into_iter().chain(bytes).chain(behind.iter().copied()).collect::<Vec<u8>>()
    };
    let shared = b"nvidia.com/gpu.shared";
    vec![
        ("pass", words(0, &[0], b"")),
        // Some, two parts, again after 9 s; a part with a line of 4 shares, and one without.
        (
            "offer",
            words(
                0,
                &[
                    1,
                    AT + 24,
                    2,
                    1,
                    9,
                    0, //
                    0,
                    AT + 48,
                    1,
                    1,
                    0,
                    0, //
                    AT + 88,
                    21,
                    4,
                    0,
                    1,
                    0,
                    20_480,
                    0,
                    25,
                    0,
                ],
                shared,
            ),
        ),
        (
            "offer-whole",
            words(
                0,
                &[1, AT + 24, 1, 0, 0, 0, 1, AT + 40, 1, 0, AT + 80, 21, 1, 0, 0, 0, 0, 0, 0, 0],
                shared,
            ),
        ),
        // Devices 0 and 1, and a reason.
        ("place", words(1, &[1, AT + 20, 2, AT + 28, 4, 0, 1], b"fine")),
        // Allowed: a variable, limits, a reason.
        (
            "allow",
            words(
                2,
                &[1, 0, 0, 0, AT + 64, 1, 1, 0, 4_096, 0, 1, 50, AT + 80, 4, 0, 0, AT + 80, 4, AT + 84, 4],
                b"MY_Afine",
            ),
        ),
        ("deny", words(2, &[1, 0, 1, 0, AT + 24, 4], b"none")),
        ("triage", words(3, &[1, 1, AT + 24, 4, 1, 60], b"warm")),
    ]
}
