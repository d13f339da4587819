//! Every hostile guest: how it is met, where it must be stopped, and in which words.

use super::guests::{bomb, component, guest, instances, nested, numbered, parsed};
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
    /// Whether it takes a minute of processor time to be stopped.
    pub(crate) slow: bool,
}

/// Fuel ends a loop, or the clock does where the machine is busy: 400 million units are 180 ms of an
/// idle one.
const LOOPS: &[&str] = &["place: used up its 400000000 units of fuel (fuel)", "place: ran longer than 500 ms (time)"];
const DESCRIBES: &[&str] = &["`describe`: used up its 400000000 units of fuel (fuel)"];

const fn text(name: &'static str, meets: Meets, errors: &'static [&'static str]) -> Case {
    Case { name, meets, errors, bytes: guest, slow: false }
}

const fn made(name: &'static str, bytes: fn(&'static str) -> Vec<u8>, errors: &'static [&'static str]) -> Case {
    Case { name, meets: Upload, errors, bytes, slow: false }
}

/// The table.
pub(crate) const CASES: &[Case] = &[
    // Never an instance, never described.
    text("loop-in-start", Upload, DESCRIBES),
    text("loop-in-describe", Upload, DESCRIBES),
    text("memory-at-once", Upload, &["?"]),
    text("table-at-once", Upload, &["?"]),
    text("memory64", Upload, &["?"]),
    text("threads", Upload, &["?"]),
    made("wasi", |_| component("wasi"), &["?"]),
    made("other-world", |_| component("other-world"), &["?"]),
    made("empty", |_| Vec::new(), &["?"]),
    made("no-world", |_| parsed("(module (func (export \"offer\")))"), &["?"]),
    made("instances", |_| instances(100), &["?"]),
    made("nested", |_| nested(1_000), &["?"]),
    made("cut", |_| { let all = numbered(0); all[..all.len() / 2].to_vec() }, &["?"]),
    Case { slow: true, ..made("bomb", |_| bomb(200_000), &["?"]) },
    // Lies of `describe`.
    text("lie-name", Upload, &["?"]),
    text("lie-schema", Upload, &["?"]),
    text("lie-hooks", Upload, &["?"]),
    text("lie-flags", Upload, &["?"]),
    text("lie-shipped", Harmless, &[]),
    // Offers.
    text("answer-aliased", Activation, &["?"]),
    text("part-out-of-range", Activation, &["?"]),
    text("part-twice", Activation, &["?"]),
    text("resource-no-name", Activation, &["?"]),
    text("offer-beyond-memory", Activation, &["?"]),
    text("offer-too-many", Activation, &["?"]),
    text("offer-foreign-resource", Activation, &["?"]),
    // Placements.
    text("loop-in-hook", Place, LOOPS),
    text("loop-in-realloc", Activation, &["?"]),
    text("log-flood", Place, LOOPS),
    text("log-huge", Place, &["?"]),
    text("memory-grab", Place, &["?"]),
    text("memory-grab-polite", Harmless, &[]),
    text("table-grab", Place, &["?"]),
    text("recursion", Place, &["?"]),
    text("trap", Place, &["?"]),
    text("trap-with-words", Place, &["?"]),
    text("panic", Place, &["?"]),
    text("forged-room", Activation, &["?"]),
    text("answer-beyond-memory", Place, &["?"]),
    text("answer-oversized", Place, &["?"]),
    text("answer-no-pointer", Place, &["?"]),
    text("answer-no-text", Place, &["?"]),
    text("device-out-of-range", Place, &["?"]),
    text("device-twice", Place, &["?"]),
    text("device-not-available", PlaceTwice, &["?"]),
    text("reason-escape", Place, &["?"]),
    // Verdicts.
    text("answer-no-case", Admit, &["?"]),
    text("limits-beyond-memory", Admit, &["?"]),
    text("environment-closed", Admit, &["?"]),
];
