//! Makes single calls of NVML, each with its name for the case that it hangs or fails.

use super::fence::Steps;
use berth_kernel::ids::names::BadName;
use nvml_wrapper::error::NvmlError;

/// Why a GPU could not be read.
#[derive(Debug)]
pub(super) enum ReadError {
    /// This call returned an error.
    Call(&'static str, NvmlError),
    /// A UUID cannot be used as a part's id.
    Uuid(BadName),
}

/// Makes a call; its name is recorded first, so that a hang or an error can be reported with it. One that makes several
/// calls records the others itself.
pub(super) fn invoke<T>(
    steps: &Steps,
    call: &'static str,
    make: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<T, ReadError> {
    steps.at(call);
    make().map_err(|error| ReadError::Call(steps.now(), error))
}

/// The same for a call that the model, the driver or the daemon's rights may not support: then `None`.
pub(super) fn invoke_optional<T>(
    steps: &Steps,
    call: &'static str,
    make: impl FnOnce() -> Result<T, NvmlError>,
) -> Result<Option<T>, ReadError> {
    match invoke(steps, call, make) {
        Ok(value) => Ok(Some(value)),
        Err(ReadError::Call(_, error)) if is_unavailable(&error) => Ok(None),
        Err(failed) => Err(failed),
    }
}

fn is_unavailable(error: &NvmlError) -> bool {
    use NvmlError as E;
    matches!(
        error,
        E::NotSupported
            | E::NoPermission
            | E::NotFound
            | E::NoData
            | E::FailedToLoadSymbol(_)
            | E::FunctionNotFound
            | E::UnexpectedVariant(_)
    )
}
