//! See `cases/lift.rs`.
#![no_main]

#[path = "../cases/mod.rs"]
mod cases;
#[path = "../../examples/hostile/table/guests.rs"]
#[allow(dead_code)]
mod guests;
mod room;

use berth::kernel::policy::PolicyVersion;
use berth::kernel::time::Now;
use berth::ports::Policies;
use std::sync::OnceLock;

static PARROT: OnceLock<PolicyVersion> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        room::compiler();
        let parrot = room::policies().install(&guests::guest("parrot"), Now::default());
        let _ = PARROT.set(parrot.expect("the parrot is a policy"));
    },
    |data: &[u8]| {
        let parrot = PARROT.get().expect("set before the first input");
        cases::lift::run(room::policies(), parrot, data);
    }
);
