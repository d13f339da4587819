//! What policies were asked and said, in lines for whoever writes one.

use berth_core::admission::Heard;
use berth_kernel::ledger::Ledger;
use berth_kernel::policy::Hook;
use berth_kernel::words;

/// Who answered what, and below it what it logged. GPUs go by their index on `node`.
fn lines(heard: &Heard, node: &Ledger) -> Vec<String> {
    let answer = match &heard.answer {
        Ok(None) => "pass".into(),
        Ok(Some(answer)) => words::answer(answer, node),
        Err(fault) => format!("fault: {fault}"),
    };
    let log = heard.said.iter().map(|line| format!("  log: {line}"));
    std::iter::once(format!("{} {}: {answer}", heard.policy, heard.hook)).chain(log).collect()
}

/// The lines of one step. Offers are asked whenever the node moves, and once more until it rests: what a
/// policy offers again, word for word, is told once.
pub(super) fn once<'h>(told: impl IntoIterator<Item = &'h Heard>, node: &Ledger) -> Vec<String> {
    let told: Vec<&Heard> = told.into_iter().collect();
    let is_told = |place: usize| {
        let this = told[place];
        let mut before = told[..place].iter().rev();
        let before = before.find(|other| other.hook == this.hook && other.policy == this.policy);
        this.hook == Hook::Offer && before == Some(&this)
    };
    let news = (0..told.len()).filter(|place| !is_told(*place));
    news.flat_map(|place| lines(told[place], node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::names::Digest;
    use berth_kernel::policy::{Answer, OfferAnswer};

    #[test]
    fn an_offer_that_is_made_again_is_told_once_and_another_is_told() {
        let heard = |policy: &str, hook, answer| Heard {
            digest: Digest::parse(&"a".repeat(64)).unwrap(),
            policy: policy.into(),
            hook,
            answer: Ok(answer),
            said: Vec::new(),
        };
        let offer = |again_after_s| {
            heard(
                "a@1",
                Hook::Offer,
                Some(Answer::Offer(OfferAnswer { again_after_s, ..OfferAnswer::default() })),
            )
        };
        let other = |heard: Heard| Heard { policy: "b@2".into(), ..heard };
        let place = heard("a@1", Hook::Place, None);
        let story = [
            place.clone(),
            place,
            offer(None),
            other(offer(None)),
            offer(None),
            other(offer(None)),
            offer(Some(3)),
            offer(None),
        ];
        let first = "a@1 offer: no GPU named";
        assert_eq!(
            once(&story, &Ledger::default()),
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
