//! A failing run made short: events are dropped as long as the same invariant still breaks.

use super::event::Event;
use super::run::run;

/// Runs tried at most: some hundred a second.
const TRIES_MAX: usize = 3_000;

/// The fewest events found that break `invariant` in the world of `seed`.
pub(crate) fn shrink(seed: u64, mut events: Vec<Event>, invariant: &'static str) -> Vec<Event> {
    let mut tries = 0;
    let mut breaks = |events: &[Event]| {
        tries += 1;
        (
            run(seed, events, |_, _, _| {}).broken.is_some_and(|(v, _)| v.invariant == invariant),
            tries < TRIES_MAX,
        )
    };
    let mut chunk = events.len() / 2;
    while chunk > 0 {
        let mut at = 0;
        let mut dropped = false;
        while at < events.len() {
            let mut shorter = events.clone();
            shorter.drain(at..(at + chunk).min(events.len()));
            let (same, go_on) = breaks(&shorter);
            if same {
                events = shorter;
                dropped = true;
            } else {
                at += chunk;
            }
            if !go_on {
                return events;
            }
        }
        if !dropped || chunk > 1 {
            chunk /= 2;
        }
    }
    events
}
