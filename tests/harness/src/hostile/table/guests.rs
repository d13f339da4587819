//! Guests as bytes: from their text under `tests/guests`, and those that are too long to write down.

// A guest that cannot be built is a mistake in its text.
#![allow(clippy::unwrap_used)]

use std::fmt::Write as _;
use std::path::Path;
use wit_component::StringEncoding;

/// What every policy must export, by the text that a guest has if it brings its own.
const DEFAULTS: [(&str, &str); 7] = [
    ("(export \"memory\")", "memory"),
    ("(export \"cabi_realloc\")", "cabi_realloc"),
    ("(export \"describe\")", "describe"),
    ("(export \"offer\")", "offer"),
    ("(export \"place\")", "place"),
    ("(export \"admit\")", "admit"),
    ("(export \"triage\")", "triage"),
];

/// The repository: the package's folder, or the one above for the fuzz targets.
fn root() -> &'static Path {
    let mut folders = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors();
    folders.find(|folder| folder.join("tests/guests").is_dir()).unwrap()
}

fn text(name: &str) -> String {
    let path = root().join("tests/guests").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// A core module of the world `policy`: the guest's fields, and those of `default/` that it does
/// not bring itself.
pub fn guest(name: &str) -> Vec<u8> {
    module(&text(&format!("{name}.wat")))
}

/// As [`guest`], from text.
pub fn module(fields: &str) -> Vec<u8> {
    // Imports come first in a module.
    let (imports, rest): (Vec<&str>, Vec<&str>) =
        fields.lines().partition(|line| line.starts_with("(import"));
    let mut all = imports.join("\n") + "\n";
    for (export, name) in DEFAULTS {
        if !fields.contains(export) {
            all += &text(&format!("default/{name}.wat"));
        }
    }
    all += &rest.join("\n");
    let mut module = wat::parse_str(&all).unwrap_or_else(|error| panic!("{error}"));
    let mut resolve = wit_parser::Resolve::default();
    let (package, _) = resolve.push_path(root().join("policies-wasm/wit")).unwrap();
    let world = resolve.select_world(&[package], Some("policy")).unwrap();
    let utf8 = StringEncoding::UTF8;
    wit_component::embed_component_metadata(&mut module, &resolve, world, utf8).unwrap();
    module
}

/// A component, written out.
pub fn component(name: &str) -> Vec<u8> {
    let text = text(&format!("{name}.component.wat"));
    parsed(&text)
}

/// A function of a thousand locals and the given number of loops: 330 kB of them take 17 s and 200 MB.
pub fn bomb(loops: u32) -> Vec<u8> {
    let locals = "i64 ".repeat(1000);
    let mut body = String::new();
    for n in 0..loops {
        let (a, b) = (n % 1000, n * 7 % 1000);
        write!(
            body,
            "(loop (local.set {a} (i64.add (local.get {a}) (local.get {b}))) \
             (br_if 0 (i64.eqz (local.get {b}))))"
        )
        .unwrap();
    }
    module(&format!("(func $bomb (export \"bomb\") (local {locals}) {body})"))
}

/// A component that makes an instance of one small module so many times, each with a memory and a
/// table.
pub fn instances(count: usize) -> Vec<u8> {
    let all = "(core instance (instantiate $module))".repeat(count);
    parsed(&format!("(component (core module $module (memory 1) (table 1 funcref)) {all})"))
}

/// Components within components, so deep.
pub fn nested(depth: usize) -> Vec<u8> {
    // Each a section of the one around it; the text format's parser would give up sooner.
    const HEADER: &[u8] = b"\0asm\x0d\0\x01\0";
    const COMPONENT: u8 = 4;
    let mut inner = HEADER.to_vec();
    for _ in 0..depth {
        let mut outer = HEADER.to_vec();
        outer.push(COMPONENT);
        let mut length = inner.len();
        loop {
            // LEB128, seven bits a byte.
            let low = u8::try_from(length & 0x7f).unwrap_or_default();
            length >>= 7;
            outer.push(if length == 0 { low } else { low | 0x80 });
            if length == 0 {
                break;
            }
        }
        outer.extend(inner);
        inner = outer;
    }
    inner
}

/// A module that passes on everything, and differs from all others of other numbers.
pub fn numbered(number: u32) -> Vec<u8> {
    module(&format!("(data (i32.const 0x600) \"{number}\")"))
}

/// As a fuzzer found it, under `tests/guests/bytes`.
pub fn found(name: &str) -> Vec<u8> {
    std::fs::read(root().join("tests/guests/bytes").join(name).with_extension("wasm")).unwrap()
}

/// From text.
pub fn parsed(text: &str) -> Vec<u8> {
    wat::parse_str(text).unwrap_or_else(|error| panic!("{error}"))
}
