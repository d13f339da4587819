//! Claims that are prepared and unprepared, by several calls at the same time, while the daemon is killed.
//!
//! As a scheduler does, a claim is allocated GPUs that no other claim has, and they are free only when the claim's
//! unprepare was answered with success. As a kubelet does, a call that was not answered is made again.

use super::SOON;
use super::claim_server::{AllocatedClaim, ClaimServer, NAMESPACE};
use super::process::Listed;
use super::rng::Rng;
use super::tally::Wrong;
use berth_proto::dra::dra_plugin_client::DraPluginClient;
use berth_proto::dra::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use fakes::plugin;
use futures_util::future::join_all;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tonic::transport::Channel;

pub(crate) const DRIVER: &str = "gpu.nvidia.com";
/// The node's name, which is the pool's.
pub(crate) const POOL: &str = "node-1";
/// Most calls at the same time.
const CALLS_MAX: u64 = 3;

/// What the kubelet knows of a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// No prepare of it was answered with success.
    Asked,
    /// The CDI ids of its devices, as they were answered first.
    Prepared(Vec<Vec<String>>),
    /// It is to be unprepared.
    Leaving,
}

#[derive(Clone, Debug)]
struct Known {
    name: String,
    gpus: BTreeSet<String>,
    state: State,
}

/// A call, and how it was answered.
enum Answered {
    Prepared(Vec<Vec<String>>),
    Unprepared,
    /// The claim could not be prepared, and why.
    Refused(String),
    /// The connection ended.
    Nothing,
}

/// What the load needs from round to round.
#[derive(Debug)]
pub(crate) struct ClaimLoad {
    server: ClaimServer,
    socket: PathBuf,
    specifications: PathBuf,
    /// UUIDs of the GPUs that are granted through DRA.
    gpus: Vec<String>,
    rng: Rng,
    /// By UID.
    claims: BTreeMap<String, Known>,
    /// UIDs of claims whose unprepare was answered with success.
    released: BTreeSet<String>,
    /// On a small disk, an unprepare is answered with success although it could not be recorded.
    is_small_disk: bool,
    /// Claims so far.
    named: u64,
    /// First prepares answered with success.
    pub(crate) prepared: u64,
    /// Calls answered with an error.
    pub(crate) refused: u64,
}

impl ClaimLoad {
    /// `kubelet_dir`: the kubelet's folder; `specifications`: the folder of the CDI specifications.
    pub(crate) fn new(
        server: ClaimServer,
        kubelet_dir: &Path,
        specifications: &Path,
        gpus: Vec<String>,
        rng: Rng,
    ) -> Self {
        Self {
            server,
            socket: kubelet_dir.join("plugins").join(DRIVER).join("dra.sock"),
            specifications: specifications.to_owned(),
            gpus,
            rng,
            claims: BTreeMap::new(),
            released: BTreeSet::new(),
            is_small_disk: false,
            named: 0,
            prepared: 0,
            refused: 0,
        }
    }

    /// Says that unprepares may be answered without being recorded, since another program fills the disk.
    pub(crate) fn on_small_disk(&mut self) {
        self.is_small_disk = true;
    }

    /// Makes calls until the daemon is dead. Returns what was wrong.
    pub(crate) async fn run(&mut self, dead: &watch::Receiver<bool>) -> Vec<Wrong> {
        let mut wrong = Vec::new();
        while !*dead.borrow() {
            let Ok(channel) = plugin::channel(&self.socket).await else {
                tokio::time::sleep(Duration::from_millis(1)).await;
                continue;
            };
            let client = DraPluginClient::new(channel);
            let mut is_connected = true;
            while is_connected && !*dead.borrow() {
                let chosen = self.choose();
                let answered = join_all(chosen.iter().map(|uid| self.call(&client, uid))).await;
                for (uid, answered) in chosen.iter().zip(answered) {
                    is_connected &= !matches!(answered, Answered::Nothing);
                    wrong.extend(self.note(uid, answered));
                }
                tokio::task::yield_now().await;
            }
        }
        wrong
    }

    /// Unprepares every claim that is not prepared, so that list and kubelet can become equal.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub(crate) async fn settle(&mut self) -> anyhow::Result<()> {
        let unsettled =
            self.claims.iter_mut().filter(|(_, known)| !matches!(known.state, State::Prepared(_)));
        let uids: Vec<String> = unsettled
            .map(|(uid, known)| {
                known.state = State::Leaving;
                uid.clone()
            })
            .collect();
        let end = Instant::now() + SOON;
        let client = loop {
            match plugin::channel(&self.socket).await {
                Ok(channel) => break DraPluginClient::new(channel),
                Err(error) if Instant::now() > end => return Err(error),
                Err(_) => tokio::time::sleep(Duration::from_millis(1)).await,
            }
        };
        for uid in uids {
            let answered = self.call(&client, &uid).await;
            anyhow::ensure!(matches!(answered, Answered::Unprepared), "the claim {uid} was not unprepared");
            self.note(&uid, answered);
        }
        Ok(())
    }

    /// The claims of the next calls.
    fn choose(&mut self) -> Vec<String> {
        let count = 1 + self.rng.below(CALLS_MAX);
        let mut chosen = Vec::new();
        for _ in 0..count {
            let held: BTreeSet<&String> = self.claims.values().flat_map(|known| &known.gpus).collect();
            let free: Vec<String> = self.gpus.iter().filter(|gpu| !held.contains(gpu)).cloned().collect();
            let uids: Vec<String> =
                self.claims.keys().filter(|uid| !chosen.contains(*uid)).cloned().collect();
            if !free.is_empty() && (uids.is_empty() || self.rng.chance(50)) {
                chosen.push(self.allocate(free));
            } else if !uids.is_empty() {
                let uid = self.rng.pick(&uids).clone();
                // A pod of a claim that is not prepared may be deleted, too; a prepared one is also prepared again.
                let leaves = self.rng.chance(60);
                if let Some(known) = self.claims.get_mut(&uid).filter(|_| leaves) {
                    known.state = State::Leaving;
                }
                chosen.push(uid);
            }
        }
        chosen
    }

    /// A claim of one or two GPUs.
    fn allocate(&mut self, mut free: Vec<String>) -> String {
        self.named += 1;
        let (name, uid) = (format!("c{}", self.named), format!("claim-{}", self.named));
        let count = if self.rng.chance(30) { 2 } else { 1 };
        let mut gpus = BTreeSet::new();
        while gpus.len() < count && !free.is_empty() {
            let at = self.rng.below(free.len() as u64);
            gpus.insert(free.swap_remove(usize::try_from(at).unwrap_or(0)));
        }
        let devices = gpus.iter().map(|gpu| gpu.to_ascii_lowercase()).collect();
        self.server.allocate(&AllocatedClaim { name: &name, uid: &uid, driver: DRIVER, pool: POOL, devices });
        self.claims.insert(uid.clone(), Known { name, gpus, state: State::Asked });
        uid
    }

    async fn call(&self, client: &DraPluginClient<Channel>, uid: &str) -> Answered {
        let Some(known) = self.claims.get(uid) else { return Answered::Nothing };
        let claim = Claim { namespace: NAMESPACE.into(), uid: uid.to_owned(), name: known.name.clone() };
        let (mut client, claims) = (client.clone(), vec![claim]);
        if known.state == State::Leaving {
            let answer = client.node_unprepare_resources(NodeUnprepareResourcesRequest { claims }).await;
            let Ok(answer) = answer else { return Answered::Nothing };
            let error =
                answer.into_inner().claims.remove(uid).map_or_else(String::new, |answer| answer.error);
            return if error.is_empty() { Answered::Unprepared } else { Answered::Refused(error) };
        }
        let answer = client.node_prepare_resources(NodePrepareResourcesRequest { claims }).await;
        let Ok(answer) = answer else { return Answered::Nothing };
        let answer = answer.into_inner().claims.remove(uid).unwrap_or_default();
        if answer.error.is_empty() {
            Answered::Prepared(answer.devices.into_iter().map(|device| device.cdi_device_ids).collect())
        } else {
            Answered::Refused(answer.error)
        }
    }

    fn note(&mut self, uid: &str, answered: Answered) -> Option<Wrong> {
        let known = self.claims.get_mut(uid)?;
        match answered {
            Answered::Prepared(ids) => match &known.state {
                State::Prepared(first) if *first != ids => Some(Wrong::Mismatch(format!(
                    "the claim {uid} was answered {first:?} first, and then {ids:?}"
                ))),
                State::Prepared(_) => None,
                State::Asked | State::Leaving => {
                    let is_whole = ids.len() == known.gpus.len();
                    let why = format!("the claim {uid} of {:?} was answered {ids:?}", known.gpus);
                    known.state = State::Prepared(ids);
                    self.prepared += 1;
                    (!is_whole).then_some(Wrong::Mismatch(why))
                }
            },
            Answered::Unprepared => {
                self.server.delete(&known.name);
                self.claims.remove(uid);
                self.released.insert(uid.to_owned());
                None
            }
            Answered::Refused(why) => {
                self.refused += 1;
                // Its GPUs are free, unless a release of them could not be recorded.
                (!self.is_small_disk).then(|| Wrong::Mismatch(format!("the claim {uid} was refused: {why}")))
            }
            Answered::Nothing => None,
        }
    }

    /// Checks the list of allocations after a restart, while no call is made.
    pub(crate) fn check(&mut self, list: &[Listed]) -> Vec<Wrong> {
        let of_claims: Vec<(&str, &Listed)> =
            list.iter().filter_map(|a| Some((a.claim.as_ref()?.uid.as_str(), a))).collect();
        let mut wrong = doubles(list);
        for (uid, known) in &self.claims {
            let live: Vec<&Listed> = of_claims.iter().filter(|(of, _)| of == uid).map(|(_, a)| *a).collect();
            wrong.extend(match &known.state {
                State::Prepared(ids) => self.lost(uid, known, ids, &live),
                State::Asked | State::Leaving => None,
            });
        }
        for (uid, allocation) in &of_claims {
            if self.claims.contains_key(*uid) {
                continue;
            }
            if self.released.remove(*uid) && self.is_small_disk {
                // The daemon was killed before it could record the release, so the claim is unprepared again.
                let known = Known {
                    name: (*uid).to_owned(),
                    gpus: allocation.devices.iter().cloned().collect(),
                    state: State::Leaving,
                };
                self.claims.insert((*uid).to_owned(), known);
            } else {
                wrong.push(Wrong::Mismatch(format!(
                    "{} is live, and its claim {uid} was unprepared",
                    allocation.id
                )));
            }
        }
        wrong
    }

    /// Why a prepared claim has lost something; `None` if it has not.
    fn lost(&self, uid: &str, known: &Known, ids: &[Vec<String>], live: &[&Listed]) -> Option<Wrong> {
        let [allocation] = live else {
            return Some(Wrong::Lost(format!(
                "the claim {uid} of {:?} has {} allocations",
                known.gpus,
                live.len()
            )));
        };
        let devices: BTreeSet<String> = allocation.devices.iter().cloned().collect();
        if devices != known.gpus {
            return Some(Wrong::Lost(format!("the claim {uid} of {:?} has {devices:?} now", known.gpus)));
        }
        let is_own = |ids: &Vec<String>| {
            ids.first().is_some_and(|id| id.starts_with(&format!("{DRIVER}/berth={}-", allocation.id)))
        };
        if !ids.iter().all(is_own) {
            return Some(Wrong::Mismatch(format!(
                "the claim {uid} was answered {ids:?}, but its allocation is {}",
                allocation.id
            )));
        }
        let file = self.specifications.join(format!("{DRIVER}-berth_{uid}.json"));
        (!file.is_file())
            .then(|| Wrong::Lost(format!("the claim {uid} has no CDI specification {}", file.display())))
    }

    /// Whether an allocation is of a claim that is prepared.
    pub(crate) fn explains(&self, allocation: &Listed) -> bool {
        let claim = allocation.claim.as_ref().and_then(|claim| self.claims.get(&claim.uid));
        claim.is_some_and(|known| matches!(known.state, State::Prepared(_)))
    }
}

/// GPUs of claims that another allocation has, too.
fn doubles(list: &[Listed]) -> Vec<Wrong> {
    let gpu = |device: &str| device.split("::").next().unwrap_or(device).to_owned();
    let gpus = |allocation: &Listed| allocation.devices.iter().map(|d| gpu(d)).collect::<BTreeSet<_>>();
    let mut wrong = Vec::new();
    for allocation in list.iter().filter(|a| a.claim.is_some()) {
        let own = gpus(allocation);
        for other in list.iter().filter(|other| other.id != allocation.id && !gpus(other).is_disjoint(&own)) {
            wrong.push(Wrong::Double(format!("{own:?} of {} and of {}", allocation.id, other.id)));
        }
    }
    wrong
}
