//! What policies were asked and said, in lines for whoever writes one.

use crate::admission::Heard;
use crate::kernel::ledger::Ledger;
use crate::kernel::words;

/// Who answered what, and below it what it logged. GPUs go by their index on `node`.
pub(super) fn lines(heard: &Heard, node: &Ledger) -> Vec<String> {
    let answer = match &heard.answer {
        Ok(None) => "pass".into(),
        Ok(Some(answer)) => words::answer(answer, node),
        Err(fault) => format!("fault: {fault}"),
    };
    let log = heard.said.iter().map(|line| format!("  log: {line}"));
    std::iter::once(format!("{} {}: {answer}", heard.policy, heard.hook)).chain(log).collect()
}
