//! The API of the kubelet through which a GPU is granted, together with its MIG instances: the device plugin API or DRA.
//! The scheduler counts the devices of each API by itself, so it would allocate a GPU twice that both show.
//!
//! An operator moves a GPU to the other API while the node runs. What it holds stays; nothing new is allocated through the
//! former API, and the move is finished when nothing holds the GPU through that, and the scheduler has seen the order
//! ([`waits_for`]).
//!
//! `devicePlugin -> toDra -> dra -> toDevicePlugin -> devicePlugin`

use crate::drain::marks::Author;
use crate::ids::names::{AllocationId, GpuId};
use crate::ids::time::Now;
use crate::node::change::Change;
use crate::node::ledger::Ledger;
use crate::node::refusal::Refusal;
use std::fmt;

/// An API of the kubelet that grants devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum KubeletApi {
    /// The device plugin API.
    #[default]
    DevicePlugin,
    /// Dynamic resource allocation: ResourceSlices and ResourceClaims.
    Dra,
}

impl KubeletApi {
    /// Its value in the REST API and in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::DevicePlugin => "devicePlugin",
            Self::Dra => "dra",
        }
    }

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::DevicePlugin => Self::Dra,
            Self::Dra => Self::DevicePlugin,
        }
    }

    /// The API with this value.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        [Self::DevicePlugin, Self::Dra].into_iter().find(|api| api.as_str() == text)
    }
}

impl fmt::Display for KubeletApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::DevicePlugin => "the device plugin API",
            Self::Dra => "DRA",
        })
    }
}

/// The API of one GPU, and an order to move it to the other one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Via {
    /// The API through which it is granted.
    pub api: KubeletApi,
    /// Whether it is to be moved to the other API: nothing new is allocated meanwhile.
    pub moving: bool,
    /// The name of the caller who gave the last order; empty if there was none.
    pub by: String,
    /// The caller's reason; may be empty.
    pub why: String,
    /// When the order was given or the GPU was moved, whichever was last, milliseconds since 1970; 0 if neither.
    pub since_wall_ms: u64,
    /// The same, or the start of this process, monotonic milliseconds.
    pub since_mono_ms: u64,
}

impl Via {
    /// That of a new GPU.
    #[must_use]
    pub fn new(api: KubeletApi) -> Self {
        Self { api, ..Self::default() }
    }

    /// Its state in the REST API.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match (self.api, self.moving) {
            (api, false) => api.as_str(),
            (KubeletApi::DevicePlugin, true) => "toDra",
            (KubeletApi::Dra, true) => "toDevicePlugin",
        }
    }

    /// Whether devices may be granted through `api`. A claim that the scheduler allocated before an order is still granted its
    /// devices. The device plugin grants nothing after an order: the kubelet assigns no device before its Allocate succeeds.
    #[must_use]
    pub fn grants(&self, api: KubeletApi) -> bool {
        self.api == api && (api == KubeletApi::Dra || !self.moving)
    }

    /// With its times by the clock of this process, after it was read from the store.
    #[must_use]
    pub fn restored(self, now: Now) -> Self {
        Self { since_mono_ms: now.mono_ms, ..self }
    }
}

/// What a GPU that is to be moved still waits for, as far as the ledger shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitsFor {
    /// This allocation of the former API has not ended.
    Holder(AllocationId),
    /// The scheduler may not have seen the order yet.
    Scheduler {
        /// For how many milliseconds more.
        left_ms: u64,
    },
}

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Holder(id) => {
                write!(f, "allocation {id} has not ended (see `berth allocation show {id}`)")
            }
            Self::Scheduler { left_ms } => {
                write!(
                    f,
                    "the scheduler may not have seen the order yet; {} s are left",
                    left_ms.div_ceil(1000)
                )
            }
        }
    }
}

/// What the GPU still waits for; `None` if it is not to be moved, or waits for nothing that the ledger shows.
#[must_use]
pub fn waits_for(ledger: &Ledger, gpu: &GpuId, now: Now) -> Option<WaitsFor> {
    let via = ledger.gpus.get(gpu).map(|state| &state.via).filter(|via| via.moving)?;
    let of_former_api =
        |id: &AllocationId| ledger.live.get(id).is_some_and(|allocation| allocation.origin.api() == via.api);
    let holders = ledger.allocations_on(ledger.parts_of(gpu)).into_iter().map(|allocation| allocation.id);
    if let Some(holder) = holders.filter(of_former_api).min() {
        return Some(WaitsFor::Holder(holder));
    }
    let left_ms = via.since_mono_ms.saturating_add(ledger.rules.timing.via_ms).saturating_sub(now.mono_ms);
    (left_ms > 0).then_some(WaitsFor::Scheduler { left_ms })
}

/// The change by an order to grant the GPU through `api`. An order for the API that it has cancels a move to the other.
///
/// # Errors
/// If there is no such GPU.
pub fn order(
    ledger: &Ledger,
    gpu: &GpuId,
    api: KubeletApi,
    author: &Author,
    now: Now,
) -> Result<Vec<Change>, Refusal> {
    let via = &find(ledger, gpu)?;
    let moving = via.api != api;
    if moving == via.moving {
        return Ok(Vec::new());
    }
    let via = Via {
        api: via.api,
        moving,
        by: author.by.clone(),
        why: author.why.clone(),
        since_wall_ms: now.wall_ms,
        since_mono_ms: now.mono_ms,
    };
    Ok(vec![Change::ViaChanged { gpu: gpu.clone(), via }])
}

/// The change when a GPU is granted through the other API from now on. The caller has read from the API server that
/// nothing is allocated through the former one any more.
///
/// # Errors
/// If there is no such GPU, or it still waits for something that the ledger shows.
pub fn finish_move(ledger: &Ledger, gpu: &GpuId, now: Now) -> Result<Vec<Change>, Refusal> {
    let via = find(ledger, gpu)?;
    if !via.moving {
        return Ok(Vec::new());
    }
    if let Some(waits_for) = waits_for(ledger, gpu, now) {
        return Err(Refusal::CannotMoveYet { gpu: gpu.clone(), waits_for });
    }
    let via = Via {
        api: via.api.other(),
        moving: false,
        since_wall_ms: now.wall_ms,
        since_mono_ms: now.mono_ms,
        ..via.clone()
    };
    Ok(vec![Change::ViaChanged { gpu: gpu.clone(), via }])
}

fn find<'l>(ledger: &'l Ledger, gpu: &GpuId) -> Result<&'l Via, Refusal> {
    let state = ledger.gpus.get(gpu).ok_or_else(|| Refusal::UnknownGpu { gpu: gpu.clone() })?;
    Ok(&state.via)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::gpu::{Inventory, Part};
    use crate::ids::names::{DeviceId, Resource};
    use crate::node::command::{Attempt, Command, StackAnswer};
    use crate::node::record::records;
    use crate::node::restore::restore;
    use crate::node::revision::Revision;
    use crate::node::test_node::{Node, gpu_id, part};
    use crate::node::tick::next_tick;
    use crate::policy::hooks::AdmitRequest;
    use crate::sharing::listing::{free_devices, listing};
    use crate::sharing::offer::{Consumes, OfferLine, PartOffer};

    /// GPU-0 is offered whole.
    fn node() -> Node {
        let mut node = Node::new();
        let line = OfferLine { resource: Resource::nvidia_gpu(), count: 1, consumes: Consumes::Whole };
        let offer = PartOffer { part: part("GPU-0"), lines: vec![line] };
        node.decide(&Command::Offer(vec![(offer, "test".into())])).unwrap();
        node
    }

    fn gpu() -> GpuId {
        gpu_id("GPU-0")
    }

    fn set(node: &mut Node, api: KubeletApi) -> usize {
        let author = Author::api("ann".into(), "new jobs".into());
        node.decide(&Command::SetVia { gpu: gpu(), api, author }).unwrap().changes.len()
    }

    fn finish_move(node: &mut Node) -> Result<&'static str, Refusal> {
        node.decide(&Command::FinishMove { gpu: gpu() })?;
        Ok(state(node))
    }

    fn state(node: &Node) -> &'static str {
        node.ledger.gpus[&gpu()].via.as_str()
    }

    fn allocate(node: &mut Node) -> Result<AllocationId, Refusal> {
        let devices = vec![DeviceId::whole(&part("GPU-0"))];
        node.decide(&Command::Allocate {
            request: AdmitRequest { resource: Resource::nvidia_gpu(), devices, claim: None },
            answer: StackAnswer::NotCalled,
            evaluated: None,
            attempt: Attempt::Last { asked_mono_ms: 0 },
        })?;
        Ok(*node.ledger.live.keys().next_back().unwrap())
    }

    #[test]
    fn a_gpu_is_moved_when_nothing_holds_it_and_the_scheduler_has_seen_the_order() {
        let mut node = node();
        let holder = allocate(&mut node).unwrap();
        assert_eq!(finish_move(&mut node), Ok("devicePlugin"), "there is no order");
        assert_eq!(set(&mut node, KubeletApi::Dra), 1);
        assert_eq!(set(&mut node, KubeletApi::Dra), 0, "the same order");
        assert_eq!(state(&node), "toDra");
        node.now.mono_ms += 30_000;
        assert_eq!(waits_for(&node.ledger, &gpu(), node.now), Some(WaitsFor::Holder(holder)));
        assert!(matches!(finish_move(&mut node), Err(Refusal::CannotMoveYet { .. })));
        node.decide(&Command::End { id: holder, force: true }).unwrap();
        assert!(free_devices(&node.ledger, &Resource::nvidia_gpu()).is_empty());
        assert!(matches!(allocate(&mut node), Err(Refusal::OtherApi { via: "toDra", .. })));
        node.now.mono_ms -= 1;
        assert_eq!(waits_for(&node.ledger, &gpu(), node.now), Some(WaitsFor::Scheduler { left_ms: 1 }));
        node.now.mono_ms += 1;
        assert_eq!(finish_move(&mut node), Ok("dra"));
        assert_eq!(node.ledger.gpus[&gpu()].via.by, "ann");
        assert!(allocate(&mut node).is_err());
        assert_eq!(set(&mut node, KubeletApi::DevicePlugin), 1);
        assert_eq!(state(&node), "toDevicePlugin");
        node.now.mono_ms += 30_000;
        assert_eq!(finish_move(&mut node), Ok("devicePlugin"));
        allocate(&mut node).unwrap();
    }

    #[test]
    fn a_move_is_cancelled_at_once() {
        let mut node = node();
        set(&mut node, KubeletApi::Dra);
        assert_eq!((set(&mut node, KubeletApi::DevicePlugin), state(&node)), (1, "devicePlugin"));
        node.now.mono_ms += 60_000;
        assert_eq!(finish_move(&mut node), Ok("devicePlugin"));
        allocate(&mut node).unwrap();
    }

    #[test]
    fn an_order_outlives_a_restart_and_waits_anew() {
        let mut node = node();
        set(&mut node, KubeletApi::Dra);
        node.now.mono_ms += 30_000;
        node.ledger = restore(records(&node.ledger), node.now);
        assert_eq!(state(&node), "toDra");
        assert_eq!(waits_for(&node.ledger, &gpu(), node.now), Some(WaitsFor::Scheduler { left_ms: 30_000 }));
    }

    fn is_listed_after(node: &mut Node, ms: u64) -> bool {
        node.now.mono_ms += ms;
        let due = next_tick(&node.ledger, node.now).filter(|due| *due <= node.now.mono_ms);
        let changes = node.decide(&Command::Tick).unwrap().changes;
        assert_eq!(changes.is_empty(), due.is_none(), "{changes:?}");
        !listing(&node.ledger, &Resource::nvidia_gpu()).is_empty()
    }

    #[test]
    fn the_devices_of_a_gpu_leave_the_device_lists_a_minute_after_it_was_moved_to_dra() {
        let mut node = node();
        set(&mut node, KubeletApi::Dra);
        assert!(is_listed_after(&mut node, 120_000), "the move is not finished");
        finish_move(&mut node).unwrap();
        assert!(is_listed_after(&mut node, 59_999));
        assert!(!is_listed_after(&mut node, 1));
        assert!(!is_listed_after(&mut node, 120_000));
        set(&mut node, KubeletApi::DevicePlugin);
        assert!(is_listed_after(&mut node, 120_000), "the GPU is to be moved back");
        // After a restart the wait begins again, since it is not known yet who holds the GPU.
        set(&mut node, KubeletApi::Dra);
        assert!(!is_listed_after(&mut node, 60_000));
        node.ledger = restore(records(&node.ledger), node.now);
        assert!(is_listed_after(&mut node, 59_999));
        assert!(!is_listed_after(&mut node, 1));
    }

    #[test]
    fn a_device_that_a_container_holds_through_the_device_plugin_api_stays_listed() {
        let mut node = node();
        let holder = allocate(&mut node).unwrap();
        let via = Via::new(KubeletApi::Dra);
        node.ledger.with_gpu(&gpu(), |state| state.via = via);
        assert!(is_listed_after(&mut node, 120_000));
        node.decide(&Command::End { id: holder, force: true }).unwrap();
        assert!(is_listed_after(&mut node, 59_999));
        assert!(!is_listed_after(&mut node, 1));
    }

    /// The kubelet may know the ids from another plugin.
    #[test]
    fn a_destroyed_instance_stays_for_a_whole_wait_once_it_is_listed_again() {
        let mut node = Node::new();
        let on_gpu = gpu_id("GPU-1");
        node.ledger.with_gpu(&on_gpu, |state| {
            state.via = Via::new(KubeletApi::Dra);
            state.unlisting_wait_since_mono_ms = None;
        });
        let mut parts: Vec<Part> = node.ledger.parts.values().map(|state| state.part.clone()).collect();
        parts.retain(|one| one.id != part("MIG-a"));
        node.decide(&Command::RecordScan(Inventory { parts, ..Inventory::default() })).unwrap();
        node.now.mono_ms += 30_000;
        let author = Author::api("ann".into(), String::new());
        node.decide(&Command::SetVia { gpu: on_gpu, api: KubeletApi::DevicePlugin, author }).unwrap();
        for (ms, is_known) in [(59_999, true), (1, false)] {
            node.now.mono_ms += ms;
            node.decide(&Command::Tick).unwrap();
            assert_eq!(node.ledger.parts.contains_key(&part("MIG-a")), is_known, "{ms}");
        }
    }

    #[test]
    fn an_order_after_another_one_is_refused_if_its_caller_has_not_read_that() {
        let mut node = node();
        let read = Revision::Via { gpu: gpu(), via: Via::default() };
        set(&mut node, KubeletApi::Dra);
        let author = Author::api("bob".into(), String::new());
        let command = Command::SetVia { gpu: gpu(), api: KubeletApi::DevicePlugin, author };
        assert_eq!(node.decide(&command.expecting(Some(read))), Err(Refusal::ViaChanged { gpu: gpu() }));
    }
}
