//! The judgements that a GPU's health follows from.

use crate::hardware::gpu::{ECC, Reading};
use crate::hardware::triage::{Severity, TriageAnswer, needs_reset};
use crate::ids::time::Now;
use crate::policy::decider::Decider;

/// Most judgements of one GPU: they and its history fit into a record of 16 KiB, even if escaping doubles each text.
pub const JUDGEMENTS_MAX: usize = 5;
/// Longest reason of a state, bytes; history and judgements must fit into a record of 16 KiB.
pub(crate) const REASON_BYTES_MAX: usize = 256;
/// Longest stored detail of a reading, bytes, for the same reason.
pub(crate) const DETAIL_BYTES_MAX: usize = 128;

/// A reading with its triage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TriagedReading {
    /// The reading.
    pub reading: Reading,
    /// Its severity and the reason.
    pub answer: TriageAnswer,
    /// What judged it.
    pub by: Decider,
}

/// A judgement of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judgement {
    /// The reading, with a detail that may be cut; `None` for an error of a scan.
    pub reading: Option<Reading>,
    /// What judged it.
    pub by: Decider,
    /// Revision of the stack that judged it.
    pub revision: u64,
    /// The severity.
    pub severity: Severity,
    /// The reason.
    pub reason: String,
    /// How long it stands without further readings, milliseconds; `None` if only an operator or a reset ends it.
    pub quiet_ms: Option<u64>,
    /// When the reading last came, monotonic milliseconds. After a restart of the daemon it is the time of the restart.
    pub at_mono_ms: u64,
}

impl Judgement {
    /// The judgement of a reading that came at this time; `None` if it has no effect. An event after which the GPU
    /// needs a reset is kept although a policy ignores it, since it counts once the policy is removed.
    pub(crate) fn of_reading(triaged: &TriagedReading, revision: u64, at_mono_ms: u64) -> Option<Self> {
        let TriagedReading { reading, answer, by } = triaged;
        let is_ignored = answer.severity == Severity::Ignore;
        (!is_ignored || is_overruled(reading, by)).then(|| Self {
            reading: Some(Reading { detail: shown(&reading.detail, DETAIL_BYTES_MAX), ..reading.clone() }),
            by: by.clone(),
            revision,
            severity: answer.severity,
            reason: shown(&answer.reason, REASON_BYTES_MAX),
            quiet_ms: answer.quiet_ms().filter(|_| !is_ignored),
            at_mono_ms,
        })
    }

    /// The judgement of an error of a scan, which no policy makes.
    pub(crate) fn of_scan(reason: &str, quiet_ms: Option<u64>, now: Now) -> Self {
        Self {
            reading: None,
            by: Decider::Baseline,
            revision: 0,
            severity: Severity::Unhealthy,
            reason: shown(reason, REASON_BYTES_MAX),
            quiet_ms,
            at_mono_ms: now.mono_ms,
        }
    }

    /// The end of its quiet time, monotonic milliseconds.
    pub(crate) fn quiet_until_mono_ms(&self) -> u64 {
        self.at_mono_ms.saturating_add(self.quiet_ms.unwrap_or(0))
    }

    /// Whether it still makes the GPU degraded or unhealthy.
    pub(crate) fn is_valid(&self, now: Now) -> bool {
        self.severity != Severity::Ignore
            && (self.quiet_ms.is_none() || self.quiet_until_mono_ms() > now.mono_ms)
    }

    /// Whether the GPU needs a reset after its reading.
    pub(crate) fn needs_reset(&self) -> bool {
        self.reading.as_ref().is_some_and(needs_reset)
    }

    /// What is kept of the judgement once the GPU heals: that a policy decided about an event after which the GPU needs
    /// a reset, since the event counts once the policy is removed.
    pub(crate) fn healed(&self) -> Option<Self> {
        let reading = self.reading.as_ref()?;
        is_overruled(reading, &self.by).then(|| Self {
            severity: Severity::Ignore,
            quiet_ms: None,
            ..self.clone()
        })
    }

    /// Whether the judgement is of the same sign, with the same source and code, and its severity is not `ignore`.
    pub(crate) fn is_of_sign(&self, sign: &Reading) -> bool {
        let is_same = |reading: &Reading| {
            reading.is_sign() && (&reading.source, reading.code) == (&sign.source, sign.code)
        };
        self.severity != Severity::Ignore && self.reading.as_ref().is_some_and(is_same)
    }

    /// Judgements with the same key are merged. The code of an ECC reading is a count, which differs from scan to scan.
    fn key(&self) -> (Option<(&str, u64)>, &Decider) {
        let key_of = |reading: &Reading| if reading.source == ECC { 0 } else { reading.code };
        (self.reading.as_ref().map(|reading| (reading.source.as_str(), key_of(reading))), &self.by)
    }
}

/// Whether the GPU needs a reset after this event, which no scan repeats.
fn needs_reset_after(event: &Reading) -> bool {
    !event.is_sign() && needs_reset(event)
}

/// Whether a policy decided about an event after which the GPU needs a reset.
fn is_overruled(reading: &Reading, by: &Decider) -> bool {
    matches!(by, Decider::Policy(_)) && needs_reset_after(reading)
}

/// Adds a judgement. One of the same source, code and judge is merged with it: the higher severity and the longer quiet
/// time are kept. Beyond [`JUDGEMENTS_MAX`] the least important judgement is dropped. The most important is each
/// judge's newest judgement of an event that comes once and needs a reset, since one such event is enough for the GPU
/// to wait for a reset; then come judgements that no quiet time ends, then the more severe, then the newer.
pub(crate) fn add(judgements: &mut Vec<Judgement>, mut judgement: Judgement) {
    if let Some(index) = judgements.iter().position(|known| known.key() == judgement.key()) {
        let known = judgements.remove(index);
        judgement = match (known.severity, judgement.severity) {
            (Severity::Ignore, _) => judgement,
            (_, Severity::Ignore) => known,
            (old, new) => {
                judgement.quiet_ms = known.quiet_ms.zip(judgement.quiet_ms).map(|(old, new)| old.max(new));
                if old > new {
                    (judgement.severity, judgement.reason) = (known.severity, known.reason);
                }
                judgement
            }
        };
    }
    judgements.push(judgement);
    let waits_for_reset = |one: &Judgement| one.reading.as_ref().is_some_and(needs_reset_after);
    while judgements.len() > JUDGEMENTS_MAX {
        let rank = |(index, one): &(usize, &Judgement)| {
            let is_newest =
                !judgements[index + 1..].iter().any(|later| later.by == one.by && waits_for_reset(later));
            let is_endless = one.severity != Severity::Ignore && one.quiet_ms.is_none();
            (waits_for_reset(one) && is_newest, is_endless, one.severity, one.at_mono_ms)
        };
        let least = judgements.iter().enumerate().min_by_key(rank);
        let Some(index) = least.map(|(index, _)| index) else { return };
        judgements.remove(index);
    }
}

/// The text, cut to at most `bytes_max` bytes and with spaces for control characters: library messages may contain
/// some, and texts are shown on terminals.
pub(crate) fn shown(text: &str, bytes_max: usize) -> String {
    text[..text.floor_char_boundary(bytes_max)].replace(char::is_control, " ")
}
