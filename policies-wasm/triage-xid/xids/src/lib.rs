//! The table of XIDs, which the daemon's built-in baseline uses, too. After NVIDIA's catalogue of XIDs for Ampere and newer GPUs
//! (docs.nvidia.com/deploy/xid-errors), mainly its column of immediate actions. The descriptions are not
//! NVIDIA's. A comment explains each difference from the catalogue.

/// What has to be done after an XID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Caused by an application, which has to be restarted. The GPU itself is healthy.
    Application,
    /// Corrected, or only a note about another error that is reported separately.
    Notice,
    /// The GPU continues to work, but is shown as degraded.
    Degraded,
    /// The GPU must be reset.
    Reset,
    /// The GPU cannot be reached until the node is rebooted; every scan of it fails until then.
    Bus,
    /// Manual work on the machine or its hypervisor is needed.
    ManualWork,
}

/// Class and description of an XID; `None` if the catalogue has no action for it.
pub fn known(code: u64) -> Option<(Class, &'static str)> {
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
    use Class::{Bus, Degraded, ManualWork, Notice, Reset};
    Some(match code {
        14 | 106 | 107 => (Notice, "a test message"),
        // The access of a peer over NVLink was refused; the peer's application has to be restarted (NVIDIA's open kernel
        // modules, `kern_gmmu_ga100.c`).
        108 => (Notice, "an access by a peer was not valid"),
        37 | 38 | 44 | 66 | 67 | 141 | 152 | 153 => {
            (Notice, "an error that can be ignored, according to NVIDIA")
        }
        93 => (Notice, "the wear limit of the InfoROM was reached"),
        121 => (Notice, "corrected errors on the link to the CPU"),
        // Reported for every change of the recovery action, including a change to none. The action itself is
        // read in every scan.
        154 => (Notice, "the recovery action of the GPU changed"),
        162 => (Notice, "power smoothing is back"),
        // According to the catalogue, the application has to be restarted and the PCIe link is the cause.
        32 | 80 => (Degraded, "data arrived corrupted over PCIe"),
        63 => (Degraded, "a memory row was remapped, or a page retired; it takes effect at the next reset"),
        92 => (Degraded, "many single bit ECC errors"),
        94 => (Degraded, "a memory error that was contained to one application; reset when convenient"),
        // The catalogue demands a reset, but NVIDIA's device plugin ignores it as an application's error. If
        // a reset is needed, the recovery action shows it.
        109 => (Degraded, "context switch timeout"),
        // The required action depends on details that an event does not contain; a reset of a peer causes them, too.
        // Drivers that send these XIDs also report the recovery action.
        74 => (Degraded, "NVLink error, of this GPU or of its peer"),
        144..=150 => (Degraded, "NVLink error"),
        155 => (Degraded, "NVLink went down"),
        157 => (Degraded, "a repair was not possible: no spare resources"),
        159 => (Degraded, "error on the link to the CPU"),
        160 => (Degraded, "a memory channel was retired"),
        161 => (Degraded, "a memory channel could not be retired"),
        163..=165 => (Degraded, "power smoothing is off, or soon worn out"),
        46 => (Reset, "the GPU stopped processing"),
        48 => (Reset, "double bit ECC error"),
        62 => (Reset, "internal micro-controller halt"),
        64 => (Reset, "a memory row could not be remapped, or a page not retired"),
        95 => (Reset, "a memory error that was not contained"),
        110 => (Reset, "security fault"),
        119 => (Reset, "the GPU's system processor did not answer"),
        120 => (Reset, "error of the GPU's system processor"),
        136 => (Reset, "NVLink training failed"),
        140 => (Reset, "uncorrectable ECC error that could not be repaired"),
        143 => (Reset, "the GPU could not be initialised"),
        156 => (Reset, "a part of the GPU was retired; it takes effect at the next reset"),
        158 => (Reset, "fatal timeout"),
        // Reported together with XID 48, with the location of the error.
        171 | 172 => (Reset, "uncorrectable memory error"),
        79 => (Bus, "the GPU fell off the bus"),
        54 => (ManualWork, "auxiliary power is not connected"),
        142 => (ManualWork, "video encoder failure"),
        151 => (ManualWork, "key rotation failed: restart the virtual machine"),
        _ => return None,
    })
}
