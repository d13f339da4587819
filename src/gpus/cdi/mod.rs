//! Specifications of the Container Device Interface (CDI, spec 1.1): which exist on the node, Berth's own, and the
//! comparison of two.
//!
//! A container runtime with CDI reads the specifications in some folders of the host and adds to a container what they
//! say of the devices that it is given by name.

mod compare;
mod driver;
mod folders;
mod generate;
mod spec;

pub use compare::{Comparison, compare, missing_host_paths};
pub use driver::{Driver, DriverError};
pub use folders::{FileState, NamedDevices, file_state, file_states, named_devices};
pub use generate::{Generated, fingerprint, generate};
pub use spec::{ContainerEdits, Device, DeviceNode, Mount, OciHook, ReadError, SPEC_BYTES_MAX, Spec};

/// The kind of Berth's own specification.
pub const OWN_KIND: &str = "berth/gpu";
/// The file of Berth's own specification.
pub const OWN_FILE: &str = "berth-gpu.json";
