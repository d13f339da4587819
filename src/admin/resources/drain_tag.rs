//! The strong tag of a GPU's drain state, for `If-Match`.

use berth_kernel::drain::{AtDeadline, Drain};
use std::hash::{DefaultHasher, Hash, Hasher};

/// The tag of a GPU's drain state: it depends on what operators set, not on the progress.
pub(crate) fn of(drain: &Drain) -> String {
    let Some(mark) = drain.mark() else {
        return format!("\"{}\"", drain.as_str());
    };
    let order = drain.order().map(|order| {
        let then = match order.at_deadline {
            AtDeadline::Wait => 0u8,
            AtDeadline::Delete => 1,
            AtDeadline::GiveUp => 2,
        };
        (order.evict, order.deadline_wall_ms, then)
    });
    let mut hasher = DefaultHasher::new();
    (&mark.by, &mark.why, mark.since_wall_ms, order).hash(&mut hasher);
    format!("\"{}-{:016x}\"", drain.as_str(), hasher.finish())
}

#[cfg(test)]
mod tests {
    use super::*;
    use berth_kernel::drain::{Mark, Order};

    #[test]
    fn the_tag_of_a_drain_follows_what_operators_set() {
        let mark = |why: &str| Mark { by: "admin".into(), why: why.into(), since_wall_ms: 7 };
        let late = Order { deadline_wall_ms: Some(9), ..Order::default() };
        let states = [
            Drain::Active,
            Drain::Cordoned(mark("a")),
            Drain::Cordoned(mark("b")),
            Drain::Draining(mark("a"), Order::default()),
            Drain::Draining(mark("a"), Order { evict: true, ..Order::default() }),
            Drain::Draining(mark("a"), Order { at_deadline: AtDeadline::GiveUp, ..late }),
            Drain::Draining(mark("a"), late),
            Drain::Drained(mark("a")),
        ];
        let tags: std::collections::BTreeSet<_> = states.iter().map(of).collect();
        assert_eq!(tags.len(), states.len());
        assert_eq!(of(&states[1]), of(&states[1].clone()));
    }
}
