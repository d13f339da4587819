//! The exported functions, the same for every policy. Native callers also use them to call a policy as
//! the daemon does: with a [`Context`], for an answer.

use crate::{
    AdmitRequest, Context, Description, OfferAnswer, PlaceRequest, Placement, Policy, Reading, TriageAnswer,
    Verdict, parse,
};

/// Logs the message of a panic, which would be lost otherwise: a module has no standard error. The
/// daemon shows the last lines that a faulty call logged.
fn log_panics() {
    #[cfg(target_arch = "wasm32")]
    std::panic::set_hook(Box::new(|info| crate::log(&info.to_string())));
}

/// The policy with the parameters of this call. Wrong parameters end the call with a fault; its last
/// logged line is the error.
fn policy<P: Policy>(context: &Context) -> P {
    log_panics();
    let error = match parse(&context.parameters).map(P::new) {
        Ok(Ok(policy)) => return policy,
        Ok(Err(error)) | Err(error) => error,
    };
    #[cfg(target_arch = "wasm32")]
    {
        crate::log(&format!("parameters: {error}"));
        core::arch::wasm32::unreachable()
    }
    #[cfg(not(target_arch = "wasm32"))]
    panic!("parameters: {error}")
}

pub fn describe<P: Policy>() -> Description {
    log_panics();
    P::describe()
}

pub fn offer<P: Policy>(context: &Context) -> Option<OfferAnswer> {
    policy::<P>(context).offer(&context.node)
}

pub fn place<P: Policy>(context: &Context, request: &PlaceRequest) -> Option<Placement> {
    policy::<P>(context).place(&context.node, request)
}

pub fn admit<P: Policy>(context: &Context, request: &AdmitRequest) -> Option<Verdict> {
    policy::<P>(context).admit(&context.node, request)
}

pub fn triage<P: Policy>(context: &Context, reading: &Reading) -> Option<TriageAnswer> {
    policy::<P>(context).triage(&context.node, reading)
}
