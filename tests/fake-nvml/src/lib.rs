//! A fake `libnvidia-ml.so.1`, driven by a file that may change while it runs.
//!
//! The `cdylib` has NVML's C ABI: any program that opens NVML by name can use it, for example through nvml-wrapper or
//! go-nvml. It shows the GPUs, links, processes, counters and events of a *state file*, and looks at that file on every
//! call, so that a change is seen by the next call. The file is named by the environment variable `FAKE_NVML_CONFIG`;
//! if that is not set it is `fake-nvml.json` in the folder of the library. Without a good file `nvmlInit` answers
//! `DRIVER_NOT_LOADED` and says why on stderr. If the file turns bad later, the last good state stays and one line on
//! stderr says so; if it is removed, the last good state stays, and nothing is printed.
//!
//! The `rlib` is for tests in Rust: [`State`] is the file as a value, with machines to start from ([`State::h100`] and
//! others), and [`Installed`] puts a copy of the library and a state into a folder.
//!
//! ```no_run
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use fake_nvml::{Installed, State};
//!
//! let nvml = Installed::new("/tmp/nvml".as_ref(), &State::h100(8))?;
//! // ... a program opens nvml.library() ...
//! nvml.change(|state| {
//!     let uuid = state.gpus[2].uuid.clone();
//!     state.push_xid(&uuid, 79);
//!     state.gpus[2].lost = true;
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! # The state file
//!
//! JSON. Unknown names are refused. Write a new file next to the old one and rename it into place (as [`State::write`]
//! does), so that no call reads half of it. Everything that can stand in it:
//!
//! ```
//! # let text = r#"
//! {
//!   "driver_version": "570.172.08",
//!   "cuda_version": 12080,
//!   "counts_at_init": true,
//!   "memory_limits": "dmem",
//!   "gpus": [
//!     {
//!       "uuid": "GPU-4d8a5f1e-8a5c-4b0e-9f63-0d4c7a8e2b11",
//!       "name": "NVIDIA A100-SXM4-80GB",
//!       "memory_total_mib": 81920,
//!       "memory_used_mib": 1024,
//!       "memory_reserved_mib": 600,
//!       "pci_bus_id": "00000000:07:00.0",
//!       "pci_device_id": 548409566,
//!       "pci_subsystem_id": 0,
//!       "minor": 0,
//!       "numa_node": 0,
//!       "memory_numa_node": null,
//!       "compute_capability": [8, 0],
//!       "brand": 14,
//!       "architecture": 7,
//!       "serial": "1600000020000",
//!       "mig": {
//!         "enabled": true,
//!         "pending": true,
//!         "max_devices": 7,
//!         "instances": [
//!           {
//!             "uuid": "MIG-0c3d9c5a-6f5e-5a7e-b0a4-4a1f4a0e9d21",
//!             "gpu_instance": 7,
//!             "compute_instance": 0,
//!             "profile": "1g.10gb",
//!             "memory_mib": 10240,
//!             "memory_used_mib": 1024,
//!             "slices": 1,
//!             "multiprocessors": 14
//!           }
//!         ]
//!       },
//!       "nvlinks": [
//!         { "remote": { "gpu": "GPU-9f1b2c3d-1111-4222-8333-444455556666" }, "active": true },
//!         { "remote": { "switch": "00000000:D0:00.0" }, "active": false }
//!       ],
//!       "processes": [
//!         { "pid": 4711, "memory_mib": 1024, "name": "python", "mps": false, "utilization": 12, "gpu_instance": 7, "compute_instance": 0 }
//!       ],
//!       "ecc": { "enabled": true, "corrected_volatile": 0, "uncorrected_volatile": 0, "corrected_aggregate": 2, "uncorrected_aggregate": 0 },
//!       "remapped_rows": { "correctable": 0, "uncorrectable": 1, "pending": true, "failed": false },
//!       "recovery_action": "gpu_reset",
//!       "temperature_c": 41,
//!       "power_mw": 65000,
//!       "power_limit_mw": 400000,
//!       "utilization_gpu": 12,
//!       "utilization_memory": 3,
//!       "fabric": { "state": "completed", "status": 0 },
//!       "cold_start_ms": 0,
//!       "held_file": null,
//!       "lost": false
//!     },
//!     {
//!       "uuid": "GPU-9f1b2c3d-1111-4222-8333-444455556666",
//!       "name": "NVIDIA A100-SXM4-80GB",
//!       "memory_total_mib": 81920,
//!       "pci_bus_id": "00000000:0F:00.0",
//!       "numa_node": 0
//!     }
//!   ],
//!   "topology": [
//!     { "a": "GPU-4d8a5f1e-8a5c-4b0e-9f63-0d4c7a8e2b11", "b": "GPU-9f1b2c3d-1111-4222-8333-444455556666", "level": "multiple" }
//!   ],
//!   "events": [
//!     { "seq": 1, "gpu": "GPU-4d8a5f1e-8a5c-4b0e-9f63-0d4c7a8e2b11", "kind": "xid", "data": 94, "gpu_instance": 7, "compute_instance": 0 }
//!   ],
//!   "faults": [
//!     { "call": "nvmlDeviceGetMemoryInfo*", "gpu": "GPU-9f1b2c3d-1111-4222-8333-444455556666", "hang": true },
//!     { "call": "nvmlDeviceGetName", "delay_ms": 250, "times": 2 },
//!     { "call": "nvmlDeviceGetPowerUsage", "return": "NO_PERMISSION" }
//!   ]
//! }
//! # "#;
//! # let state: fake_nvml::State = serde_json::from_str(text).unwrap();
//! # let folder = std::env::temp_dir().join(format!("fake-nvml-doc-{}", std::process::id()));
//! # state.write(&folder).unwrap();
//! # assert_eq!(fake_nvml::State::read(&folder).unwrap(), state);
//! # std::fs::remove_file(&folder).unwrap();
//! ```
//!
//! Levels are `internal`, `single`, `multiple`, `hostbridge`, `node`, `system`; recovery actions `none`, `gpu_reset`,
//! `node_reboot`, `drain_p2p`, `drain_and_reset`, `recover_imex`, `bus_reset`, `system_reboot`; event kinds `xid`,
//! `single_bit_ecc`, `double_bit_ecc`, `recovery_action`; codes as in `nvml.h` without `NVML_ERROR_`. The first fault
//! that matches a call counts; one that hangs lets go when it leaves the file, and other calls go on meanwhile. A GPU
//! that is `lost`, or that leaves the list, answers `GPU_IS_LOST` to every call.
//!
//! # What it does not do
//!
//! It changes nothing but memory limits of cgroups, which it keeps in the folder `fake-nvml.limits` beside the state
//! file: every other setter, and every symbol of the header that is not built here, is there and answers
//! `NOT_SUPPORTED`, so that programs which bind symbols lazily do not die of a missing one.
#![allow(unsafe_code, reason = "a C ABI: pointers come in from C and symbols go out")]

mod api;
mod code;
mod event;
mod fault;
mod gpu;
mod install;
mod instance;
mod link;
mod preset;
mod runtime;
mod state;

pub use code::Code;
pub use event::{Event, EventKind};
pub use fault::Fault;
pub use gpu::{Ecc, Fabric, FabricState, Gpu, Process, RecoveryAction, RemappedRows};
pub use install::{InstallError, Installed, STATE_FILE_NAME, library_path};
pub use instance::{Instance, Mig};
pub use link::{Level, NvLink, Pair, Remote};
pub use state::{LimitBackend, State, StateError};
