//! Every hostile guest: how it is met, where it must be stopped, and in which words.

use super::guests::{bomb, component, found, guest, instances, nested, numbered, parsed};
use Meets::{Activation, Admit, Harmless, Place, PlaceTwice, Upload};

/// What is done with a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Meets {
    /// It is uploaded, and refused.
    Upload,
    /// A stack that names it is activated, and refused.
    Activation,
    /// Its stack is active, and a pod comes: the hook `place` fails, and the pod gets its GPU all
    /// the same.
    Place,
    /// As `Place`, for the second pod of two.
    PlaceTwice,
    /// As `Place`, in the hook `admit`.
    Admit,
    /// It is taken, and does no harm.
    Harmless,
}

/// One row of the table.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    pub(crate) meets: Meets,
    /// The whole error, without the words that all of its kind begin with. More than one where the
    /// machine decides which limit is met first.
    pub(crate) errors: &'static [&'static str],
    pub(crate) bytes: fn(&'static str) -> Vec<u8>,
    /// Whether it is compiling that it attacks.
    pub(crate) bomb: bool,
}

/// Fuel ends a loop, or the clock does where the machine is busy: 400 million units are 180 ms of an
/// idle one.
const LOOPS: &[&str] =
    &["place: used up its 400000000 units of fuel (fuel)", "place: ran longer than 500 ms (time)"];
const FLOODS: &[&str] = &[
    "place: used up its 400000000 units of fuel; it logged: \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 \
     | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 \
     | \\0 | \\0 | \\0 | \\0 (fuel)",
    "place: ran longer than 500 ms; it logged: \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 \
     | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 | \\0 \
     | \\0 (time)",
];
/// Called when it is activated, with ten times the time of a hook.
const REALLOC: &[&str] = &["used up its 400000000 units of fuel (fuel)", "ran longer than 5000 ms (time)"];
const TOO_MUCH: &[&str] = &[
    "compilation was stopped: it needed more than 768 MiB",
    // A slow machine reaches a time limit first.
    "compilation was stopped: it took longer than 180 s of processor time",
    "compilation was stopped: it took longer than 300 s",
];
const DESCRIBES: &[&str] = &[
    "`describe`: used up its 400000000 units of fuel (fuel)",
    "`describe`: ran longer than 10000 ms (time)",
];

const fn text(name: &'static str, meets: Meets, errors: &'static [&'static str]) -> Case {
    Case { name, meets, errors, bytes: guest, bomb: false }
}

const fn made(
    name: &'static str,
    bytes: fn(&'static str) -> Vec<u8>,
    errors: &'static [&'static str],
) -> Case {
    Case { name, meets: Upload, errors, bytes, bomb: false }
}

/// The table.
pub(crate) const CASES: &[Case] = &[
    // Never an instance, never described.
    text("loop-in-start", Upload, DESCRIBES),
    text("loop-in-describe", Upload, DESCRIBES),
    text(
        "memory-at-once",
        Upload,
        &["module memory does not fit in pooling allocator requirements: memory index 0 is unsupported in \
         this pooling allocator configuration: memory has a minimum byte size of 262144000 which exceeds \
         the limit of 0x8000000 bytes"],
    ),
    text(
        "table-at-once",
        Upload,
        &["module table does not fit in pooling allocator requirements: table index 0 has a minimum \
         element size of 10000000 which exceeds the limit of 16384"],
    ),
    text(
        "memory64",
        Upload,
        &["failed to parse WebAssembly module: memory64 must be enabled for 64-bit memories (at offset \
         0x8b7)"],
    ),
    text(
        "threads",
        Upload,
        &["failed to parse WebAssembly module: threads must be enabled for shared memories (at offset \
         0x8b7)"],
    ),
    made(
        "wasi",
        |_| component("wasi"),
        &["component imports instance `wasi:clocks/wall-clock@0.2.0`, but a matching implementation was \
         not found in the linker: instance export `resolution` has the wrong type: function \
         implementation is missing"],
    ),
    made("other-world", |_| component("other-world"), &["no export `admit` found"]),
    made("empty", |_| Vec::new(), &["the file is empty: build it or copy it again"]),
    made(
        "no-world",
        |_| parsed("(module (func (export \"offer\")))"),
        &["it is a core module without a world; build it with wit-bindgen or convert it to a component"],
    ),
    made(
        "instances",
        |_| instances(100),
        &["The component transitively contains 100 core module instances, which exceeds the configured \
         maximum of 64 in the pooling allocator"],
    ),
    made("nested", |_| nested(1_000), &["no export `admit` found"]),
    made(
        "world-that-panics",
        found,
        &[
            "the compiler cannot read its 2839 bytes: the file is damaged or was built wrong; copy it or build it \
             again",
        ],
    ),
    Case { bomb: true, ..made("nested-deep", |_| nested(100_000), TOO_MUCH) },
    made(
        "cut",
        |_| {
            let all = numbered(0);
            all[..all.len() / 2].to_vec()
        },
        &["the file is not a complete WebAssembly component: it has 1421 bytes and breaks off (1422 more \
         must follow); copy it or build it again"],
    ),
    Case { bomb: true, ..made("bomb", |_| bomb(200_000), TOO_MUCH) },
    // Lies of `describe`.
    text("lie-name", Upload, &["`describe`: the name \"../../x\" is not a DNS label"]),
    text("lie-schema", Upload, &["`describe`: the schema has 60000 bytes; at most 6144"]),
    text("lie-hooks", Upload, &["`describe`: it names no hook, so it would never be called"]),
    text("lie-flags", Upload, &["`describe`: it names no hook, so it would never be called"]),
    text("lie-shipped", Harmless, &[]),
    // Offers.
    text("answer-aliased", Activation, &["passed more than 1024 KiB to the host at once (answer)"]),
    text("part-out-of-range", Activation, &["named part 77, but there are 8 (answer)"]),
    text("part-twice", Activation, &["named part 0 twice (answer)"]),
    text(
        "resource-no-name",
        Activation,
        &["\"gpu\" is not a resource name: a domain, a slash and a name, such as nvidia.com/gpu (answer)"],
    ),
    text(
        "offer-beyond-memory",
        Activation,
        &["GPU-40e3b113-e356-8f83-a45c-ca82546b96d9 cannot be offered: a device of \
         nvidia.com/gpu.shared takes 1000000 MiB of 81559 MiB (answer)"],
    ),
    text(
        "offer-too-many",
        Activation,
        &["GPU-40e3b113-e356-8f83-a45c-ca82546b96d9 cannot be offered: 4294967295 devices; its stack \
         entry permits at most 128 (permissions.shareMax) (answer)"],
    ),
    text(
        "offer-foreign-resource",
        Activation,
        &["GPU-40e3b113-e356-8f83-a45c-ca82546b96d9 cannot be offered: its stack entry may not name \
         amd.com/gpu (permissions.resources) (answer)"],
    ),
    // Placements.
    text("loop-in-hook", Place, LOOPS),
    text("loop-in-realloc", Activation, REALLOC),
    text("log-flood", Place, FLOODS),
    text("log-huge", Place, &["place: passed more than 1024 KiB to the host at once (answer)"]),
    text(
        "memory-grab",
        Place,
        &["place: requested more than 128 MiB of memory, was refused, and trapped (memory)"],
    ),
    text("memory-grab-polite", Harmless, &[]),
    text(
        "table-grab",
        Place,
        &["place: requested more than 16384 elements of one table, was refused, and trapped (memory)"],
    ),
    text("recursion", Place, &["place: used up its 256 KiB of stack (memory)"]),
    text("trap", Place, &["place: aborted without a message (`unreachable`) (trap)"]),
    text("trap-with-words", Place, &["place: out of ideas\\nERROR forged \\u{1b}[31mline (trap)"]),
    text(
        "panic",
        Place,
        &["place: panicked at src/lib.rs:7:9: index out of bounds: the len is 0 but the index is 3 (trap)"],
    ),
    text(
        "forged-room",
        Activation,
        &["passed malformed data to the host: realloc return: beyond end of memory (answer)"],
    ),
    text(
        "answer-beyond-memory",
        Place,
        &["place: passed malformed data to the host: list pointer/length out of bounds of memory (answer)"],
    ),
    text("answer-oversized", Place, &["place: passed more than 1024 KiB to the host at once (answer)"]),
    text(
        "answer-no-pointer",
        Place,
        &["place: passed malformed data to the host: pointer out of bounds of memory (answer)"],
    ),
    text(
        "answer-no-text",
        Place,
        &["place: passed malformed data to the host: invalid utf-8 sequence of 1 bytes from index 0 \
         (answer)"],
    ),
    text("device-out-of-range", Place, &["place: named device 999, but there are 8 (answer)"]),
    text("device-twice", Place, &["place: chose device 1 twice (answer)"]),
    text(
        "device-not-available",
        PlaceTwice,
        &["place: device GPU-40e3b113-e356-8f83-a45c-ca82546b96d9 is not available (answer)"],
    ),
    text("reason-escape", Place, &["place: a reason with control characters (answer)"]),
    // Verdicts.
    text(
        "answer-no-case",
        Admit,
        &["admit: passed malformed data to the host: unexpected discriminant: 9 (answer)"],
    ),
    text(
        "limits-beyond-memory",
        Admit,
        &["admit: a limit of 1000000 MiB where there are 81559 MiB (answer)"],
    ),
    text(
        "environment-closed",
        Admit,
        &[
            "admit: the environment key \"LD_PRELOAD\" is reserved: it affects the dynamic linker or the C library; \
             no policy may set it (answer)",
        ],
    ),
];
