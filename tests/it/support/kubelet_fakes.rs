//! Fakes of the ports: a clock, a store in memory, and a policy with scripted answers.

use crate::support::gpus::{MEMORY_MIB, SHARED, WHOLE, resource};
use berth_kernel::hardware::triage::{Severity, TriageAnswer};
use berth_kernel::ids::names::{DeviceId, Digest};
use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::{
    Call, CallOutput, Clock, InstallError, PolicyFiles, PolicyRuntime, Store, StoreError,
};
use berth_kernel::node::record::{Record, RecordKey, Write};
use berth_kernel::policy::hooks::{
    Answer, Fault, FaultKind, Hook, OfferAnswer, PlaceRequest, Placement, Question, Terms,
};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// The system's clocks.
pub(crate) struct RealClock(pub(crate) Instant);

impl Clock for RealClock {
    fn now(&self) -> Now {
        let wall = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let ms = |d: Duration| u64::try_from(d.as_millis()).unwrap();
        Now { wall_ms: ms(wall.unwrap()), mono_ms: ms(self.0.elapsed()) }
    }
}

/// The system's clocks, and a way to let hours pass at once.
pub(crate) struct SkipClock {
    real: RealClock,
    skipped_ms: AtomicU64,
}

impl Default for SkipClock {
    fn default() -> Self {
        Self { real: RealClock(Instant::now()), skipped_ms: AtomicU64::new(0) }
    }
}

impl SkipClock {
    pub(crate) fn skip(&self, ms: u64) {
        self.skipped_ms.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for SkipClock {
    fn now(&self) -> Now {
        let Now { wall_ms, mono_ms } = self.real.now();
        let skipped = self.skipped_ms.load(Ordering::SeqCst);
        Now { wall_ms: wall_ms + skipped, mono_ms: mono_ms + skipped }
    }
}

/// A store in memory.
#[derive(Default)]
pub(crate) struct MapStore(BTreeMap<RecordKey, Record>);

impl Store for MapStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        Ok(self.0.values().cloned().collect())
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        for write in writes {
            match write {
                Write::Put(record) => self.0.insert(record.key(), record.clone()),
                Write::Delete(key) => self.0.remove(key),
            };
        }
        Ok(())
    }

    fn path(&self) -> String {
        "memory".into()
    }
}

pub(crate) fn scripted_version() -> PolicyVersion {
    let digest = Digest::parse(&"a".repeat(64)).unwrap();
    PolicyVersion {
        name: "scripted".into(),
        version: "1.0.0".into(),
        summary: "Does what its parameters say.".into(),
        hooks: vec![Hook::Offer, Hook::Admit, Hook::Place, Hook::Triage],
        parameters_schema: "{}".into(),
        artifact: digest.clone(),
        digest,
        bytes: 1,
        shipped: false,
        since_wall_ms: 0,
        origin: berth_kernel::policy::version::Origin::default(),
    }
}

/// One policy, in this process, that follows its parameters: keywords separated by spaces. `whole`, `twice` (whole
/// under two names), `shares=N` (each takes an Nth of the memory), `deny=REASON`, `triage=SEVERITY`, `env=KEY:VALUE`,
/// `place=last`, `place=foreign`, `place=fault`, `slow` (offers in the time of a trial alone).
pub(crate) struct ScriptedPolicies;

impl ScriptedPolicies {
    fn answer(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        let words: Vec<&str> = call.parameters.split(' ').collect();
        let value = |key: &str| words.iter().find_map(|w| w.strip_prefix(key));
        match call.question {
            // A trial, which has ten times the time, passes.
            Question::Offer if words.contains(&"slow") && call.wall_ms_max < 2_000 => {
                Err(Fault { kind: FaultKind::Time, detail: "too slow".into() })
            }
            Question::Offer => {
                let lines = scripted_lines(&words, value("shares="));
                let parts =
                    call.node.parts.keys().map(|part| PartOffer { part: part.clone(), lines: lines.clone() });
                Ok(Some(Answer::Offer(OfferAnswer { parts: parts.collect(), again_after_s: None })))
            }
            Question::Admit(_) => match (value("deny="), value("env=")) {
                (Some("fault"), _) => Err(Fault { kind: FaultKind::Trap, detail: "unreachable".into() }),
                (Some(reason), _) => Ok(Some(Answer::Deny(reason.to_owned()))),
                (None, Some(pair)) => {
                    let (key, value) = pair.split_once(':').unwrap();
                    let environment = vec![(key.to_owned(), value.to_owned())];
                    Ok(Some(Answer::Allow(Terms { environment, ..Terms::default() })))
                }
                (None, None) => Ok(None),
            },
            Question::Place(request) => scripted_place(value("place="), request),
            // What is unhealthy waits for an operator.
            Question::Triage(_) => Ok(value("triage=").map(|word| {
                let (severity, again_after_s) = match word {
                    "ignore" => (Severity::Ignore, Some(60)),
                    "unhealthy" => (Severity::Unhealthy, None),
                    _ => (Severity::Degraded, Some(60)),
                };
                Answer::Triage(TriageAnswer { severity, reason: word.to_owned(), again_after_s })
            })),
        }
    }
}

impl PolicyFiles for ScriptedPolicies {
    fn install(&self, _: &[u8], _: Now) -> Result<PolicyVersion, InstallError> {
        Ok(scripted_version())
    }

    fn read_all(&self, digest: &Digest) -> Result<Vec<u8>, InstallError> {
        Err(InstallError::Lost { digest: digest.clone() })
    }

    fn remove(&self, _: &Digest) {}
}

impl PolicyRuntime for ScriptedPolicies {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        Ok(version.clone())
    }

    fn call(&self, call: Call<'_>) -> CallOutput {
        self.answer(call).into()
    }
}

fn scripted_place(word: Option<&str>, request: &PlaceRequest) -> Result<Option<Answer>, Fault> {
    let devices = match word {
        None => return Ok(None),
        Some("fault") => return Err(Fault { kind: FaultKind::Trap, detail: "unreachable".into() }),
        Some("foreign") => vec![DeviceId::parse("GPU-99").unwrap(); request.size],
        Some("last") => {
            let mut all = request.available.clone();
            all.sort();
            all.split_off(all.len() - request.size)
        }
        Some(other) => panic!("{other}"),
    };
    Ok(Some(Answer::Place(Placement { devices, reason: String::new() })))
}

fn scripted_lines(words: &[&str], shares: Option<&str>) -> Vec<OfferLine> {
    let mut lines = Vec::new();
    let whole = |name: &str| OfferLine { resource: resource(name), count: 1, consumes: Consumes::Whole };
    if words.contains(&"whole") {
        lines.push(whole(WHOLE));
    }
    if words.contains(&"twice") {
        lines.extend([whole(WHOLE), whole(SHARED)]);
    }
    if let Some(count) = shares {
        let count: u32 = count.parse().unwrap();
        lines.push(OfferLine {
            resource: resource(SHARED),
            count,
            consumes: Consumes::Slice { memory_mib: MEMORY_MIB / u64::from(count), compute_percent: 0 },
        });
    }
    lines
}
