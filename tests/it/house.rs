//! The house of ARCHITECTURE.md, held by reading the sources: which room may name which, which
//! library is named where, and how long a file may be.

use std::fs;
use std::path::{Path, PathBuf};

/// A room of `src` and the rooms that it may name with `crate::`.
const ARROWS: &[(&str, &[&str])] = &[
    ("kernel", &[]),
    ("figures", &[]),
    ("files", &[]),
    ("labels", &["kernel", "files"]),
    ("ports", &["kernel"]),
    ("kill_points", &[]),
    ("yaml", &[]),
    ("spans", &[]),
    ("keeper", &["kernel", "figures", "ports", "kill_points", "spans"]),
    ("trust", &["kernel"]),
    ("admission", &["kernel", "figures", "ports", "keeper", "spans", "trust"]),
    ("kubelet", &["kernel", "figures", "keeper", "admission", "config", "spans"]),
    ("metrics", &["kernel", "figures", "keeper", "ports", "admission", "trace"]),
    (
        "admin",
        &[
            "kernel",
            "figures",
            "files",
            "keeper",
            "admission",
            "ports",
            "config",
            "trust",
            "metrics",
            "spans",
            "trace",
            "yaml",
        ],
    ),
    ("cluster", &["kernel", "keeper", "admission", "config", "files", "labels", "spans"]),
    ("nvml", &["kernel", "ports"]),
    ("sim", &["kernel", "ports", "yaml", "files"]),
    ("procfs", &["kernel", "ports"]),
    ("store", &["kernel", "ports", "files", "kill_points"]),
    ("journal", &["kernel", "ports", "files"]),
    ("wasm", &["kernel", "ports", "spans"]),
    ("config", &["kernel", "yaml", "files"]),
    ("trace", &["config", "spans"]),
    ("telemetry", &["config", "spans", "trace", "figures"]),
    ("scenario", &["kernel", "keeper", "ports", "admission", "sim", "wasm", "store", "yaml"]),
    ("cli", &["yaml", "config", "admin", "kernel", "telemetry", "scenario", "files"]),
    (
        "daemon",
        &[
            "kernel",
            "figures",
            "labels",
            "ports",
            "keeper",
            "admission",
            "kubelet",
            "admin",
            "cluster",
            "nvml",
            "sim",
            "procfs",
            "store",
            "journal",
            "wasm",
            "config",
            "trust",
            "spans",
            "trace",
            "yaml",
        ],
    ),
];

/// A library and the one room that may name it.
const LIBRARIES: &[(&str, &str)] = &[
    ("tonic", "kubelet"),
    ("prost", "kubelet"),
    ("actix_web", "admin"),
    ("actix_http", "admin"),
    ("actix_server", "admin"),
    ("actix_service", "admin"),
    ("actix_tls", "admin"),
    ("rustls", "admin"),
    ("utoipa", "admin"),
    ("utoipa_swagger_ui", "admin"),
    ("kube", "cluster"),
    ("k8s_openapi", "cluster"),
    ("nvml_wrapper", "nvml"),
    ("sled", "store"),
    ("wasmtime", "wasm"),
    ("ring", "trust"),
    ("prometheus_client", "metrics"),
    ("wit_component", "wasm"),
    ("opentelemetry", "trace"),
    ("opentelemetry_proto", "trace"),
    ("opentelemetry_sdk", "trace"),
    ("tracing_opentelemetry", "trace"),
    ("serde_saphyr", "yaml"),
];

/// What one room serves with and another one calls with.
const SHARED_LIBRARIES: &[(&str, &str)] = &[("tonic", "trace"), ("prost", "trace")];

/// Lines that a file of `src` may have.
const LINES_MAX: usize = 400;

fn sources() -> Vec<(PathBuf, String)> {
    fn walk(folder: &Path, found: &mut Vec<(PathBuf, String)>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).unwrap();
                found.push((path, text));
            }
        }
    }
    let mut found = Vec::new();
    walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found);
    assert!(found.len() > 30, "the sources were not found");
    found
}

/// The room of a file: the first folder or file name below `src`.
fn room(path: &Path) -> String {
    let below = path.strip_prefix(Path::new(env!("CARGO_MANIFEST_DIR")).join("src")).unwrap();
    let first = below.iter().next().unwrap().to_str().unwrap();
    first.trim_end_matches(".rs").to_owned()
}

/// Source text without comments, so that a name in prose is no arrow.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("//").next().unwrap_or("")).collect::<Vec<_>>().join("\n")
}

/// The identifiers that follow `before` in the text.
fn followers<'t>(text: &'t str, before: &str) -> Vec<&'t str> {
    let ident = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(before)
        .filter(|(at, _)| !text[..*at].ends_with(ident))
        .map(|(at, _)| {
            let rest = &text[at + before.len()..];
            &rest[..rest.find(|c| !ident(c)).unwrap_or(rest.len())]
        })
        .collect()
}

#[test]
fn rooms_name_only_the_rooms_that_the_arrows_allow() {
    for (path, text) in sources() {
        let room = room(&path);
        let Some((_, may)) = ARROWS.iter().find(|(name, _)| *name == room) else {
            assert!(
                ["main", "lib"].contains(&room.as_str()),
                "{} is a room that no arrow names",
                path.display()
            );
            continue;
        };
        for named in followers(&code(&text), "crate::") {
            let is_room = ARROWS.iter().any(|(name, _)| *name == named);
            assert!(!is_room || named == room || may.contains(&named), "{} names {named}", path.display());
        }
    }
}

#[test]
fn each_library_is_named_in_its_room_only() {
    for (path, text) in sources() {
        let (room, code) = (room(&path), code(&text));
        for (library, owner) in LIBRARIES {
            let paths = followers(&code, &format!("{library}::"));
            let named = !paths.is_empty() || code.contains(&format!("use {library}"));
            let own_path = code.contains(&format!("crate::{library}::"));
            assert!(
                !named || own_path || room == *owner || SHARED_LIBRARIES.contains(&(*library, room.as_str())),
                "{} names {library}, which belongs to {owner}",
                path.display()
            );
        }
    }
}

#[test]
fn the_kernel_is_pure() {
    let impure = [
        "std::fs",
        "std::net",
        "std::io",
        "std::env",
        "std::process",
        "std::thread",
        "SystemTime",
        "Instant",
        "tokio",
        "async ",
        ".await",
        "tracing",
        "serde",
        "println!",
        "eprintln!",
    ];
    for (path, text) in sources().into_iter().filter(|(p, _)| room(p) == "kernel") {
        let code = code(&text);
        for word in impure {
            assert!(!code.contains(word), "{} says {word}", path.display());
        }
    }
}

#[test]
fn no_file_is_too_long_to_read() {
    for (path, text) in sources() {
        let lines = text.lines().count();
        let tests =
            path.file_name().is_some_and(|n| n.to_str().unwrap().contains("tests") || n == "invariants.rs");
        let most = if tests { 2 * LINES_MAX } else { LINES_MAX };
        assert!(lines <= most, "{} has {lines} lines", path.display());
    }
}

#[test]
fn main_is_a_table_of_contents() {
    let main = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/main.rs");
    let lines = fs::read_to_string(main).unwrap().lines().count();
    assert!(lines <= 90, "main.rs has {lines} lines; 90 are enough to say what happens in which order");
}

#[test]
fn every_file_of_tests_is_part_of_the_binary() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it");
    let main = std::fs::read_to_string(folder.join("main.rs")).unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        let name = file.unwrap().file_name().into_string().unwrap();
        let Some(module) = name.strip_suffix(".rs").filter(|m| *m != "main") else { continue };
        assert!(main.contains(&format!("mod {module};")), "tests/it/main.rs leaves {name} out");
    }
}
