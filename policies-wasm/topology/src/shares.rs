//! Places several shares: one from each of several well connected GPUs. If there are fewer GPUs than
//! shares, each GPU gives one, and then the next round begins.

use berth_policy_sdk::placement::{Load, loads};
use berth_policy_sdk::{Node, PlaceRequest, Placement};

use crate::grow::grow;
use crate::pairs::Pairs;
use crate::search::{EXACT_PARTS_MAX, Search, bits};

/// Fullness above which GPUs count as equally full, so that the sum for 16 GPUs fits into a `u32`. With
/// memory overcommit the fullness can be more than 100 %.
const COST_MAX: u64 = 10_000_000;

/// `None` for a single share, and if the available devices do not suffice.
pub(crate) fn place(node: &Node, request: &PlaceRequest) -> Option<Placement> {
    let size = usize::try_from(request.size).ok()?;
    if size < 2 {
        return None;
    }
    let mut loads = loads(node, request)?;
    let mut devices = request.required.clone();
    // The GPUs of required devices are in the first set and have already given their share.
    let mut given: Vec<bool> = loads.iter().map(|load| load.taken > 0).collect();
    while devices.len() < size {
        let open: Vec<usize> = (0..loads.len()).filter(|n| given[*n] || loads[*n].left() > 0).collect();
        let fresh = open.iter().filter(|n| !given[**n]).count();
        let want = (size - devices.len()).min(fresh);
        if fresh == 0 && !given.contains(&true) {
            return None;
        }
        for n in nearest(node, &loads, &open, &given, want)? {
            devices.push(loads[n].take()?);
        }
        given.fill(false);
    }
    Some(Placement { devices, reason: "shares of the best connected GPUs".to_owned() })
}

/// Chooses `want` of the open GPUs that have not given a share, so that they and those that have are
/// connected best. A GPU with a taken share stays usable for others, so the remaining GPUs have no weight; of
/// equally good sets, the emptiest one is chosen. Cordoned, draining and unhealthy GPUs are used only if the
/// others do not suffice.
fn nearest(node: &Node, loads: &[Load], open: &[usize], given: &[bool], want: usize) -> Option<Vec<usize>> {
    if want == 0 {
        return Some(Vec::new());
    }
    let working = |n: &usize| given[*n] || !loads[*n].avoid;
    let fresh_working = open.iter().filter(|n| working(n) && !given[**n]).count();
    let enough = fresh_working >= want;
    let among: Vec<usize> = open.iter().copied().filter(|n| !enough || working(n)).collect();
    let is_must = |n: usize| given[n] || (!enough && !loads[n].avoid);
    let must: Vec<usize> = (0..among.len()).filter(|k| is_must(among[*k])).collect();
    let size = among.iter().filter(|n| given[**n]).count() + want;
    let chosen = if size == among.len() {
        (0..size).collect()
    } else {
        let gpu = |n: &usize| {
            let place = node.parts.iter().position(|part| part.gpu_index == loads[*n].gpu_index);
            u32::try_from(place?).ok()
        };
        let parts: Vec<u32> = among.iter().map(gpu).collect::<Option<_>>()?;
        let pairs = Pairs::of(node, &parts)?;
        let costs: Vec<u32> =
            among.iter().map(|n| u32::try_from(loads[*n].fullness().min(COST_MAX)).unwrap_or(0)).collect();
        best(&pairs, &must, size, &costs)
    };
    Some(chosen.into_iter().map(|k: usize| among[k]).filter(|n| !given[*n]).collect())
}

fn best(pairs: &Pairs, must: &[usize], size: usize, costs: &[u32]) -> Vec<usize> {
    if pairs.len() > EXACT_PARTS_MAX {
        return grow(pairs, must, size);
    }
    let must = must.iter().fold(0, |mask, part| mask | 1 << part);
    let search = Search { pairs, must, size, leave_weight: 0, costs, own_pairs_cost_nothing: false };
    bits(search.best()).collect()
}
