//! `mixed`: offers the same GPUs both whole and as shares.
//!
//! `advertise: both` lists each GPU whole under one resource and as N shares under another; the
//! daemon withdraws devices that do not fit beside the held ones, and lists them again later.
//!
//! `advertise: latched` lists each GPU in one mode only, and changes the mode of an idle GPU when the
//! other mode runs short. It is for nodes where the scheduler must not assign a GPU twice: it learns of a
//! withdrawal up to one status period late, and a pod that is assigned in the meantime fails.
//!
//! Shares are placed on the least-held GPU first. The choice of whole GPUs is left to the daemon's
//! baseline, which places by links and NUMA nodes. GPUs in MIG mode and their instances are passed
//! on.

mod gpu;
mod latched;

use berth_policy_sdk::{
    Consumes, Description, Hooks, Node, OfferAnswer, OfferLine, Part, PartOffer, PlaceRequest, Placement,
    Policy, Slice, check_gpu_resource, placement, warn, warn_if_all_mig,
};
use serde::Deserialize;

use gpu::Gpu;
use latched::Mode;

/// Shares of one GPU at most. 16 GPUs x 128 shares are 2048 devices: a device list of about 200 kB, which
/// is sent to the kubelet at each change.
const REPLICAS_MAX: u32 = 128;
/// The default of `settleSeconds`: three status periods of the kubelet.
const SETTLE_SECONDS: u32 = 30;
/// One day: a longer time would practically never elapse.
const SETTLE_SECONDS_MAX: u32 = 24 * 60 * 60;

/// How GPUs are listed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub enum Advertise {
    /// Each GPU whole and as shares.
    Both,
    /// Each GPU in one mode only.
    Latched,
}

/// The parameters of `mixed`.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Parameters {
    /// How GPUs are listed.
    pub advertise: Advertise,
    /// Shares of a GPU.
    pub replicas: u32,
    /// The resource of whole GPUs.
    pub resource: String,
    /// The resource of shares.
    pub shared_resource: String,
    /// `both`: GPUs that are never shared, 0 by default. `latched`: free GPUs to keep whole, 1 by
    /// default.
    pub reserve_whole: Option<u32>,
    /// `both`: GPUs that are only shared, 0 by default. `latched`: GPUs with a free share to keep,
    /// 1 by default.
    pub reserve_shared: Option<u32>,
    /// `latched`: how long a GPU has no holder before its mode may change, [`SETTLE_SECONDS`] by default.
    pub settle_seconds: Option<u32>,
}

impl Parameters {
    fn settle(&self) -> u32 {
        self.settle_seconds.unwrap_or(SETTLE_SECONDS)
    }
}

impl Default for Parameters {
    fn default() -> Self {
        Self {
            advertise: Advertise::Both,
            replicas: 4,
            resource: "nvidia.com/gpu".to_owned(),
            shared_resource: "nvidia.com/gpu.shared".to_owned(),
            reserve_whole: None,
            reserve_shared: None,
            settle_seconds: None,
        }
    }
}

/// How many GPUs to keep in each mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reserve {
    whole: usize,
    shared: usize,
}

/// The policy `mixed`.
#[derive(Clone, Debug)]
pub struct Mixed {
    parameters: Parameters,
    reserve: Reserve,
}

impl Policy for Mixed {
    type Parameters = Parameters;

    fn describe() -> Description {
        Description {
            name: "mixed".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            summary: "Offers the same GPUs both whole and as shares.".into(),
            hooks: Hooks::OFFER | Hooks::PLACE,
            parameters_schema: include_str!("../schema.json").into(),
        }
    }

    fn new(parameters: Parameters) -> Result<Self, String> {
        let instead = "; `timeslice` with `resources` shares instances";
        check_gpu_resource("resource", &parameters.resource, instead)?;
        check_gpu_resource("sharedResource", &parameters.shared_resource, instead)?;
        if parameters.resource == parameters.shared_resource {
            return Err(format!(
                "sharedResource: `{}` is also the resource of whole GPUs; shares need another one",
                parameters.shared_resource
            ));
        }
        check_range("replicas", parameters.replicas, 1, REPLICAS_MAX)?;
        check_range("settleSeconds", parameters.settle(), 0, SETTLE_SECONDS_MAX)?;
        let default = match parameters.advertise {
            Advertise::Both => 0,
            // Without a reserve no mode would ever run short, and no GPU would change its mode.
            Advertise::Latched => 1,
        };
        let count = |set: Option<u32>| usize::try_from(set.unwrap_or(default)).unwrap_or(usize::MAX);
        let reserve =
            Reserve { whole: count(parameters.reserve_whole), shared: count(parameters.reserve_shared) };
        Ok(Self { parameters, reserve })
    }

    fn offer(&self, node: &Node) -> Option<OfferAnswer> {
        let gpus = Gpu::all(node, &self.parameters);
        self.warn_of_effects(node, gpus.len());
        let (modes, again_after_seconds) = match self.parameters.advertise {
            Advertise::Both => (both(gpus.len(), self.reserve), None),
            Advertise::Latched => {
                let plan = latched::plan(&gpus, self.reserve, self.parameters.settle());
                let modes = plan.modes.into_iter().map(Listed::One).collect();
                (modes, plan.again_after_seconds)
            }
        };
        let parts = gpus
            .iter()
            .zip(modes)
            .map(|(gpu, listed)| PartOffer { part: gpu.index, lines: self.lines(gpu.part, listed) });
        Some(OfferAnswer { parts: parts.collect(), again_after_seconds })
    }

    fn place(&self, node: &Node, request: &PlaceRequest) -> Option<Placement> {
        let resource = usize::try_from(request.request.resource).ok()?;
        if node.resources.get(resource)? != &self.parameters.shared_resource {
            return None;
        }
        placement::spread(node, request)
    }
}

/// What a GPU is listed as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Listed {
    One(Mode),
    Both,
}

/// The first GPUs are reserved whole, the last ones as shares. This depends on their position and not on
/// their state, so that the mode of a GPU does not change when another one fails. If there are too few
/// GPUs, whole takes precedence.
fn both(count: usize, reserve: Reserve) -> Vec<Listed> {
    let whole = reserve.whole.min(count);
    let shared = reserve.shared.min(count - whole);
    let listed = |n| match n {
        n if n < whole => Listed::One(Mode::Whole),
        n if n >= count - shared => Listed::One(Mode::Shared),
        _ => Listed::Both,
    };
    (0..count).map(listed).collect()
}

impl Mixed {
    /// Warns of parameters that have no effect, or not all of it, on a node with this number of GPUs to share.
    fn warn_of_effects(&self, node: &Node, gpus: usize) {
        warn_if_all_mig(node, "; `timeslice` with `resources` shares instances");
        if self.parameters.advertise == Advertise::Both && self.parameters.settle_seconds.is_some() {
            warn("settleSeconds: has no effect with `advertise: both`");
        }
        let Reserve { whole, shared } = self.reserve;
        let is_set = self.parameters.reserve_whole.is_some() || self.parameters.reserve_shared.is_some();
        if is_set && gpus > 0 && whole.saturating_add(shared) > gpus {
            warn(&format!(
                "reserveWhole, reserveShared: {whole} and {shared} GPUs are to be reserved, and this node has {gpus}"
            ));
        }
    }

    fn lines(&self, part: &Part, listed: Listed) -> Vec<OfferLine> {
        let whole =
            OfferLine { resource: self.parameters.resource.clone(), count: 1, consumes: Consumes::Whole };
        let count = self.parameters.replicas;
        let shared = OfferLine {
            resource: self.parameters.shared_resource.clone(),
            count,
            // Rounded down, so that all of them fit.
            consumes: Consumes::Slice(Slice {
                memory_mib: part.memory_mib / u64::from(count),
                compute_percent: 100 / count,
            }),
        };
        match listed {
            Listed::One(Mode::Whole) => vec![whole],
            Listed::One(Mode::Shared) => vec![shared],
            Listed::Both => vec![whole, shared],
        }
    }
}

fn check_range(key: &str, value: u32, min: u32, max: u32) -> Result<(), String> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(format!("{key}: {value} is out of range; write {min} to {max}"))
    }
}

berth_policy_sdk::export!(Mixed);

#[cfg(test)]
mod tests;
