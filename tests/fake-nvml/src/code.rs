//! NVML's return codes, with the names that a state file uses and the texts that `nvmlErrorString` answers.

use std::ffi::{CStr, c_uint};

use serde::{Deserialize, Serialize};

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $value:literal, $text:literal;)*) => {
        /// An NVML error code. In a state file it is written as in `nvml.h` without `NVML_ERROR_`: `"GPU_IS_LOST"`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "SCREAMING_SNAKE_CASE")]
        pub enum Code {
            $($(#[$doc])* $name = $value,)*
        }

        impl Code {
            /// The number that crosses the C ABI.
            pub fn number(self) -> c_uint {
                self as c_uint
            }

            /// The code behind a number, if NVML has it.
            pub fn from_number(number: c_uint) -> Option<Self> {
                match number {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// What `nvmlErrorString` says of it.
            pub fn text(self) -> &'static CStr {
                match self {
                    $(Self::$name => $text,)*
                }
            }
        }
    };
}

codes! {
    /// `nvmlInit` was not called.
    Uninitialized = 1, c"Uninitialized";
    /// A null pointer, a foreign handle, a number out of range.
    InvalidArgument = 2, c"Invalid Argument";
    /// The model, or this fake, does not have it.
    NotSupported = 3, c"Not Supported";
    /// The user may not.
    NoPermission = 4, c"Insufficient Permissions";
    /// Deprecated by NVML itself.
    AlreadyInitialized = 5, c"Already Initialized";
    /// Nothing by that name or index.
    NotFound = 6, c"Not Found";
    /// The caller's buffer is too small.
    InsufficientSize = 7, c"Insufficient Size";
    /// Power cables.
    InsufficientPower = 8, c"Insufficient External Power";
    /// No kernel module; here: no readable state file.
    DriverNotLoaded = 9, c"Driver Not Loaded";
    /// The time given is over.
    Timeout = 10, c"Timeout";
    /// Interrupt trouble.
    IrqIssue = 11, c"Interrupt Request Issue";
    /// A library NVML needs is missing.
    LibraryNotFound = 12, c"NVML Shared Library Not Found";
    /// A function NVML needs is missing.
    FunctionNotFound = 13, c"Function Not Found";
    /// The infoROM is damaged.
    CorruptedInforom = 14, c"Corrupted infoROM";
    /// The GPU fell off the bus.
    GpuIsLost = 15, c"GPU is lost";
    /// The GPU needs a reset first.
    ResetRequired = 16, c"GPU requires restart";
    /// The operating system or a cgroup forbids it.
    OperatingSystem = 17, c"The operating system has blocked the request.";
    /// Library and kernel module differ in version.
    LibRmVersionMismatch = 18, c"RM has detected an NVML/RM version mismatch.";
    /// The GPU is in use.
    InUse = 19, c"GPU is in use";
    /// Out of memory.
    Memory = 20, c"Insufficient Memory";
    /// No data.
    NoData = 21, c"No data";
    /// ECC forbids this vGPU call.
    VgpuEccNotSupported = 22, c"The requested vgpu operation is not available on target device because ECC is enabled.";
    /// Out of something other than memory.
    InsufficientResources = 23, c"Ran out of critical resources, other than memory";
    /// No such clock.
    FreqNotSupported = 24, c"The requested frequency is not supported";
    /// The version field of the caller's structure is wrong.
    ArgumentVersionMismatch = 25, c"The provided version is invalid or unsupported";
    /// Deprecated.
    Deprecated = 26, c"The requested functionality has been deprecated";
    /// Not ready.
    NotReady = 27, c"The system is not ready for the request";
    /// No GPU.
    GpuNotFound = 28, c"No GPUs were found";
    /// Wrong state for the call.
    InvalidState = 29, c"Resource not in correct state to perform requested operation";
    /// No such reset.
    ResetTypeNotSupported = 30, c"Reset not supported for given device and parameters";
    /// Anything else.
    Unknown = 999, c"Unknown Error";
}

/// What a call of this library ends in.
pub(crate) type Answer<T = ()> = Result<T, Code>;

/// `nvmlErrorString` of success.
pub(crate) const SUCCESS_TEXT: &CStr = c"Success";

/// The number that crosses the C ABI for an answer.
pub(crate) fn number(answer: Answer) -> c_uint {
    answer.err().map_or(0, Code::number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_is_written_by_its_header_name() {
        assert_eq!(serde_json::to_string(&Code::GpuIsLost).unwrap(), "\"GPU_IS_LOST\"");
        assert_eq!(serde_json::from_str::<Code>("\"NOT_SUPPORTED\"").unwrap(), Code::NotSupported);
    }

    #[test]
    fn numbers_convert_both_ways() {
        for number in (1..=30).chain([999]) {
            assert_eq!(Code::from_number(number).map(Code::number), Some(number));
        }
        assert_eq!(Code::from_number(0), None);
        assert_eq!(Code::from_number(31), None);
    }
}
