//! What the exported functions do, the same for every policy. Also the way for native callers to
//! run a policy as the daemon would: a [`Context`] in, an answer out.

use crate::{
    AdmitRequest, Context, Description, OfferAnswer, PlaceRequest, Placement, Policy, Reading, TriageAnswer,
    Verdict, parse,
};

/// A panic's text would be lost: a module has no standard error. The daemon shows the last lines
/// that a faulty call logged.
fn say_panics() {
    #[cfg(target_arch = "wasm32")]
    std::panic::set_hook(Box::new(|info| crate::log(&info.to_string())));
}

/// The policy of this call, or the end of it: parameters that are wrong are a fault whose last
/// logged line says what is wrong with them.
fn policy<P: Policy>(context: &Context) -> P {
    say_panics();
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
    say_panics();
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
