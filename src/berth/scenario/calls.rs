//! Formats policy calls for authors of policies.

use berth_core::stack::RecordedCall;
use berth_kernel::describe;
use berth_kernel::ledger::Ledger;
use berth_kernel::policy::Hook;

/// The policy, the hook and the answer, followed by the lines that the policy logged. GPUs have their index on `node`.
fn call_lines(call: &RecordedCall, node: &Ledger) -> Vec<String> {
    let answer = match &call.answer {
        Ok(None) => "pass".into(),
        Ok(Some(answer)) => describe::answer(answer, node),
        Err(fault) => format!("fault: {fault}"),
    };
    let log = call.log_lines.iter().map(|line| format!("  log: {line}"));
    std::iter::once(format!("{} {}: {answer}", call.policy, call.hook)).chain(log).collect()
}

/// The lines of one step's calls. `offer` is called until the ledger no longer changes, so an offer that repeats the
/// policy's last one is left out.
pub(super) fn step_lines<'h>(
    calls: impl IntoIterator<Item = &'h RecordedCall>,
    node: &Ledger,
) -> Vec<String> {
    let calls: Vec<&RecordedCall> = calls.into_iter().collect();
    let is_repeated = |index: usize| {
        let call = calls[index];
        let mut earlier = calls[..index].iter().rev();
        let last = earlier.find(|other| other.hook == call.hook && other.policy == call.policy);
        call.hook == Hook::Offer && last == Some(&call)
    };
    let shown = (0..calls.len()).filter(|index| !is_repeated(*index));
    shown.flat_map(|index| call_lines(calls[index], node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::names::Digest;
    use berth_kernel::policy::{Answer, OfferAnswer};

    #[test]
    fn a_repeated_offer_is_shown_once() {
        let call = |policy: &str, hook, answer| RecordedCall {
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            policy: policy.into(),
            hook,
            answer: Ok(answer),
            log_lines: Vec::new(),
        };
        let offer = |again_after_s| {
            call(
                "a@1",
                Hook::Offer,
                Some(Answer::Offer(OfferAnswer { again_after_s, ..OfferAnswer::default() })),
            )
        };
        let by_other = |call: RecordedCall| RecordedCall { policy: "b@2".into(), ..call };
        let place = call("a@1", Hook::Place, None);
        let calls = [
            place.clone(),
            place,
            offer(None),
            by_other(offer(None)),
            offer(None),
            by_other(offer(None)),
            offer(Some(3)),
            offer(None),
        ];
        let first = "a@1 offer: no GPU named";
        assert_eq!(
            step_lines(&calls, &Ledger::default()),
            [
                "a@1 place: pass",
                "a@1 place: pass",
                first,
                "b@2 offer: no GPU named",
                "a@1 offer: again after 3 s",
                first
            ]
        );
    }
}
