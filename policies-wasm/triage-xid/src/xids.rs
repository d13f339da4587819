//! What each XID means. After NVIDIA's catalogue of XIDs for Ampere and newer GPUs
//! (docs.nvidia.com/deploy/xid-errors), its column of immediate actions above all; the words are ours.
//! Where this differs from the catalogue, a comment says why.

/// What follows from an XID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// An application did it, and it alone is to be restarted. The GPU is well.
    Application,
    /// Corrected, or a note that belongs to something else that is told by itself.
    Notice,
    /// The GPU goes on, and is worth watching.
    Watch,
    /// The GPU must be reset.
    Reset,
    /// The GPU cannot be reached until the node is rebooted; no look at it passes until then.
    Bus,
    /// Someone has to see to the machine, or to its hypervisor.
    Hands,
}

/// Class and meaning of an XID; `None` for one that the catalogue gives no action for.
pub(crate) fn known(code: u64) -> Option<(Class, &'static str)> {
    application(code).map(|meaning| (Class::Application, meaning)).or_else(|| hardware(code))
}

fn application(code: u64) -> Option<&'static str> {
    Some(match code {
        8 | 43 => "the GPU stopped the work of an application",
        11 | 25 => "an application sent commands that are not valid",
        13 => "graphics engine exception",
        31 => "GPU memory page fault",
        39..=41 | 70..=72 | 75..=77 | 85 | 126..=135 => "copy engine exception",
        45 => "clean-up after an application ended or failed",
        60 => "video processor exception",
        68 | 83 | 84 | 88 | 89 | 96..=98 => "video decoder exception",
        69 => "graphics engine class error",
        82 | 99..=105 => "image decoder exception",
        86 | 139 => "optical flow exception",
        137 => "illegal access of a peer's memory over NVLink",
        _ => return None,
    })
}

fn hardware(code: u64) -> Option<(Class, &'static str)> {
    use Class::{Bus, Hands, Notice, Reset, Watch};
    Some(match code {
        14 | 106 | 107 => (Notice, "a test message"),
        37 | 38 | 44 | 66 | 67 | 141 | 152 | 153 => (Notice, "an error that NVIDIA says to ignore"),
        93 => (Notice, "the wear limit of the InfoROM was reached"),
        121 => (Notice, "corrected errors on the link to the CPU"),
        // Its number is that of the action's change, also back to none. The action itself is read at
        // every look.
        154 => (Notice, "the recovery action of the GPU changed"),
        162 => (Notice, "power smoothing is back"),
        // The catalogue has the application restarted, and says that it is about the PCIe link.
        32 | 80 => (Watch, "data arrived corrupted over PCIe"),
        63 => (Watch, "a memory row was remapped, or a page retired; it takes effect at the next reset"),
        92 => (Watch, "many single bit ECC errors"),
        94 => (Watch, "a memory error that was contained to one application; reset when convenient"),
        // The catalogue asks for a reset, NVIDIA's device plugin skips it as an application's error.
        // Should a reset be needed, the recovery action says so.
        109 => (Watch, "context switch timeout"),
        // What is to be done depends on details that an event does not carry. Drivers that send these
        // tell the recovery action as well.
        144..=150 => (Watch, "NVLink error"),
        157 => (Watch, "a repair was not possible for lack of spare resources"),
        159 => (Watch, "error on the link to the CPU"),
        160 => (Watch, "a memory channel was retired"),
        161 => (Watch, "a memory channel could not be retired"),
        163..=165 => (Watch, "power smoothing is off, or soon worn out"),
        46 => (Reset, "the GPU stopped processing"),
        48 => (Reset, "double bit ECC error"),
        62 => (Reset, "internal micro-controller halt"),
        64 => (Reset, "a memory row could not be remapped, or a page not retired"),
        74 => (Reset, "NVLink error, of this GPU or of its peer"),
        95 => (Reset, "a memory error that was not contained"),
        110 => (Reset, "security fault"),
        119 => (Reset, "the GPU's system processor did not answer"),
        120 => (Reset, "error of the GPU's system processor"),
        136 => (Reset, "NVLink training failed"),
        140 => (Reset, "uncorrectable ECC error that could not be repaired"),
        143 => (Reset, "the GPU could not be initialised"),
        155 => (Reset, "NVLink went down"),
        156 => (Reset, "a part of the GPU was retired; it takes effect at the next reset"),
        158 => (Reset, "fatal timeout"),
        // Told beside XID 48, with the place.
        171 | 172 => (Reset, "uncorrectable memory error"),
        79 => (Bus, "the GPU fell off the bus"),
        54 => (Hands, "auxiliary power is not connected"),
        142 => (Hands, "video encoder failure"),
        151 => (Hands, "key rotation failed: restart the virtual machine"),
        _ => return None,
    })
}
