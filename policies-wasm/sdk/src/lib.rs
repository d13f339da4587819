//! Write a policy for Berth in Rust: implement [`Policy`], name it in [`export!`], build for
//! `wasm32-unknown-unknown`.
//!
//! ```
//! use berth_policy_sdk::{Hooks, NoParameters, Node, PlaceRequest, Placement, Policy};
//!
//! /// Chooses devices in the order in which they are listed.
//! struct FirstFit;
//!
//! impl Policy for FirstFit {
//!     type Parameters = NoParameters;
//!
//!     fn describe() -> berth_policy_sdk::Description {
//!         berth_policy_sdk::Description {
//!             name: "first-fit".into(),
//!             version: "0.1.0".into(),
//!             summary: "The first devices that are available.".into(),
//!             hooks: Hooks::PLACE,
//!             parameters_schema: berth_policy_sdk::NO_PARAMETERS_SCHEMA.into(),
//!         }
//!     }
//!
//!     fn new(_: NoParameters) -> Result<Self, String> {
//!         Ok(Self)
//!     }
//!
//!     fn place(&self, _: &Node, request: &PlaceRequest) -> Option<Placement> {
//!         let size = usize::try_from(request.size).ok()?;
//!         Some(Placement {
//!             devices: request.available.iter().copied().take(size).collect(),
//!             reason: "first fit".into(),
//!         })
//!     }
//! }
//!
//! berth_policy_sdk::export!(FirstFit);
//! ```
//!
//! A policy is a pure function of its arguments: every call runs in a fresh instance, so no state is
//! kept between calls. The same crate compiles natively, where [`testing`] builds nodes for unit
//! tests; [`export!`] does nothing there.

#[cfg(all(target_arch = "wasm32", feature = "memory"))]
mod memory;
mod parameters;
pub mod placement;
pub mod room;
mod selector;
#[cfg(not(target_arch = "wasm32"))]
pub mod testing;

#[doc(hidden)]
pub mod bindings;
#[doc(hidden)]
pub mod entry;

pub use bindings::berth::policy::types::*;
pub use parameters::{
    NO_PARAMETERS_SCHEMA, NoParameters, check_gpu_resource, check_resource, matches, parse,
};
pub use selector::{
    Selector, check_selectors, is_chosen, warn_if_all_mig, warn_if_any_unused, warn_if_unused,
};

/// A policy: a value that is created from parameters, with a method for each hook that it implements.
///
/// `None` from a hook means `pass`: the next policy of the stack is called. Hooks that
/// [`Policy::describe`] does not name are never called.
pub trait Policy: Sized {
    /// The parameters of a stack entry. Derive `serde::Deserialize` with
    /// `#[serde(rename_all = "camelCase", deny_unknown_fields)]`, and give every field a default: an
    /// entry without parameters passes `{}`.
    type Parameters: serde::de::DeserializeOwned;

    /// Name, version, hooks and the schema of the parameters.
    fn describe() -> Description;

    /// Checks what the types of the parameters cannot express. The error is shown to the operator who
    /// sets them; it should name the wrong parameter and the values that are allowed.
    ///
    /// # Errors
    /// A sentence for the operator.
    fn new(parameters: Self::Parameters) -> Result<Self, String>;

    /// What each part is advertised as. A part without an offer is left to the next policy.
    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let _ = node;
        None
    }

    /// Which of the available devices to choose, including the required ones.
    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        let _ = (node, request);
        None
    }

    /// Whether these devices may be granted, and with which limits and environment.
    fn admit(&self, node: &Node, request: &AdmitRequest) -> Option<Verdict> {
        let _ = (node, request);
        None
    }

    /// How bad a health reading is.
    fn triage(&self, node: &Node, reading: &Reading) -> Option<TriageAnswer> {
        let _ = (node, reading);
        None
    }
}

/// Writes a line to the daemon's log, at most 32 lines of 1 KiB per call. Natively it is written to
/// standard error, or captured by [`testing::logged`].
pub fn log(line: &str) {
    #[cfg(target_arch = "wasm32")]
    bindings::log(line);
    #[cfg(not(target_arch = "wasm32"))]
    testing::log(line);
}

/// Warns the operator. The daemon logs a warning of `offer` once; its state and the response to an
/// activation show it until a later call of `offer` does not repeat it.
pub fn warn(line: &str) {
    log(&format!("{WARNING}{line}"));
}

/// The start of a log line that is a warning.
const WARNING: &str = "warning: ";

/// Exports a [`Policy`] from the module. Once per crate; does nothing natively.
// rustfmt cannot indent its last line.
#[rustfmt::skip]
#[macro_export]
macro_rules! export {
    ($policy:ty) => {
        #[cfg(target_arch = "wasm32")]
        const _: () = {
            struct Module;
            impl $crate::bindings::Guest for Module {
                fn describe() -> $crate::Description {
                    $crate::entry::describe::<$policy>()
                }
                fn offer(context: $crate::Context) -> Option<$crate::OfferAnswer> {
                    $crate::entry::offer::<$policy>(&context)
                }
                fn place(
                    context: $crate::Context,
                    request: $crate::PlaceRequest,
                ) -> Option<$crate::Placement> {
                    $crate::entry::place::<$policy>(&context, &request)
                }
                fn admit(context: $crate::Context, request: $crate::AdmitRequest) -> Option<$crate::Verdict> {
                    $crate::entry::admit::<$policy>(&context, &request)
                }
                fn triage(
                    context: $crate::Context,
                    reading: $crate::Reading,
                ) -> Option<$crate::TriageAnswer> {
                    $crate::entry::triage::<$policy>(&context, &reading)
                }
            }
            $crate::bindings::__export_world!(Module with_types_in $crate::bindings);
        };
    };
}
