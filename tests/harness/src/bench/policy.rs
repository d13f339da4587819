//! One hook call of a shipped policy in a fresh instance, 8 GPUs of 10 devices.

use crate::bench::calls::memory;
use crate::bench::measure::{Effort, Series};
use crate::bench::node::{House, Node, Recipe, SHARED, SHARES};
use crate::bench::table::{Budget, Row, Table};
use anyhow::{Result, ensure};
use berth_kernel::ids::names::DeviceId;
use berth_kernel::node::ledger::Ledger;
use berth_kernel::node::ports::{Call, PolicyRuntime as _};
use berth_kernel::policy::hooks::{AdmitRequest, Hook, PlaceRequest, Question};
use std::sync::Arc;
use std::time::Duration;

const SAMPLES: usize = 2000;
/// More than the daemon remembers.
const SNAPSHOTS: usize = 16;
/// Longest a call may take, milliseconds: the daemon's own limit.
const WALL_MS: u64 = 500;

pub(crate) fn measure(effort: Effort, house: &House, table: &mut Table) -> Result<()> {
    let parameters = format!("{{\"replicas\": {SHARES}}}");
    let policy = Some(("timeslice", parameters.as_str()));
    let node = Node::start(house, Recipe { gpus: "8xh100", store: memory()?, policy, resource: SHARED })?;
    let ledger = node.kernel.snapshot();
    // Each call meets another snapshot, as the first policy that a pod waits for does; what is shown of one
    // snapshot is put together once.
    let snapshots: Vec<_> = (0..SNAPSHOTS).map(|_| Arc::new(Ledger::clone(&ledger))).collect();
    let ids: Vec<DeviceId> = node.ids().iter().map(|id| DeviceId::parse(id)).collect::<Result<_, _>>()?;
    ensure!(ids.len() == 80, "{} devices instead of 80", ids.len());
    let resource = node.resource.clone();
    let admit = AdmitRequest { resource: resource.clone(), devices: vec![ids[0].clone()], claim: None };
    let place = PlaceRequest { resource, available: ids, required: Vec::new(), size: 1 };
    for (name, hook, question) in [
        ("timeslice", Hook::Place, Question::Place(&place)),
        ("timeslice", Hook::Admit, Question::Admit(&admit)),
        ("timeslice", Hook::Offer, Question::Offer),
        ("mixed", Hook::Place, Question::Place(&place)),
        ("mixed", Hook::Admit, Question::Admit(&admit)),
        ("mixed", Hook::Offer, Question::Offer),
        ("exclusive", Hook::Offer, Question::Offer),
    ] {
        let version = house.version(name)?;
        if !version.hooks.contains(&hook) {
            // It is never called, so it costs nothing.
            continue;
        }
        let parameters = if name == "exclusive" { "{}" } else { parameters.as_str() };
        let call = Call {
            digest: &version.digest,
            parameters,
            node: &ledger,
            now: house.now(),
            question,
            wall_ms_max: WALL_MS,
        };
        let answered = house.policies.call(call).answer;
        ensure!(answered.is_ok(), "{name} failed in {}: {answered:?}", hook.as_str());
        let mut series = Series::default();
        for _ in 0..effort.runs() {
            let mut snapshots = snapshots.iter().cycle();
            series.run(effort.samples(SAMPLES), || {
                let node = snapshots.next().unwrap_or(&ledger);
                house.policies.call(std::hint::black_box(Call { node, ..call })).answer.is_ok()
            });
        }
        // No pod waits for an offer; the budget is that of the hooks that a pod waits for.
        let budget = match hook {
            Hook::Describe | Hook::Offer | Hook::Triage => Budget::NONE,
            Hook::Place | Hook::Admit => {
                let micros = Duration::from_micros;
                Budget { median: Some(micros(60)), p99: Some(micros(300)), ..Budget::NONE }
            }
        };
        table.add(Row::new(format!("policy call: {name} {}, 8 x 10", hook.as_str()), &series, budget));
    }
    Ok(())
}
