//! See `tests/harness/src/fuzz/lift.rs`.
#![no_main]

mod room;

use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::PolicyFiles as _;
use berth_kernel::policy::version::PolicyVersion;
use std::sync::OnceLock;

static PARROT: OnceLock<PolicyVersion> = OnceLock::new();

libfuzzer_sys::fuzz_target!(
    init: {
        room::compiler();
        let parrot = room::policies().install(&harness::hostile::table::guests::guest("parrot"), Now::default());
        let _ = PARROT.set(parrot.expect("the parrot is a policy"));
    },
    |data: &[u8]| {
        let parrot = PARROT.get().expect("set before the first input");
        harness::fuzz::lift::run(room::policies(), parrot, data);
    }
);
