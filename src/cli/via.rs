//! `berth gpu via`: through which API of the kubelet a GPU is granted.

use crate::client::{Client, escaped};
use crate::complete;
use crate::named_gpu::{resolve, title};
use crate::output::Out;
use berth_api::{Gpu, KubeletApi, Via, ViaOrder, ViaState};
use clap::Args;
use clap_complete::engine::ArgValueCandidates;
use std::thread::sleep;
use std::time::Duration;

/// How often the API is read while the GPU is to be moved.
const INTERVAL: Duration = Duration::from_secs(1);

/// `berth gpu via`.
#[derive(Args, Debug)]
pub struct ViaArgs {
    /// Index, UUID, or the beginning of it
    #[arg(add = ArgValueCandidates::new(complete::gpus))]
    gpu: String,
    /// The API to grant it through; without it the present one is shown
    api: Option<ApiArg>,
    /// Wait until the GPU was moved
    #[arg(long, requires = "api")]
    wait: bool,
    /// The reason; recorded with the order
    #[arg(long, default_value = "", hide_default_value = true, value_name = "TEXT", requires = "api")]
    reason: String,
}

/// An API of the kubelet.
#[derive(clap::ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
enum ApiArg {
    /// The device plugin API: containers request a resource
    DevicePlugin,
    /// Dynamic resource allocation: pods request devices by ResourceClaims
    Dra,
}

pub(crate) fn run(args: &ViaArgs, client: &Client, out: &mut Out) -> anyhow::Result<()> {
    let uuid = resolve(client, &args.gpu)?;
    let path = format!("/gpus/{}/via", escaped(&uuid));
    let Some(api) = args.api else {
        return out.answer(&client.get::<Via>(&path)?, |via| via_text(via) + "\n");
    };
    let api = match api {
        ApiArg::DevicePlugin => KubeletApi::DevicePlugin,
        ApiArg::Dra => KubeletApi::Dra,
    };
    let gpu: Gpu = client.put(&path, &ViaOrder { api: api.clone(), reason: args.reason.clone() }, None)?;
    let mut via: Via = client.get(&path)?;
    let mut reported = None;
    while args.wait && via.waits_for.is_some() {
        // A reason with the time that is left is another text each second.
        let reason = via.waits_for.as_ref().map(|text| text.replace(|c: char| c.is_ascii_digit(), ""));
        if reason != reported {
            crate::output::report(&format!("{}: {}", title(&gpu), via_text(&via)));
            reported = reason;
        }
        sleep(INTERVAL);
        via = client.get(&path)?;
    }
    if args.wait && via.api != api {
        anyhow::bail!(
            "the move of {} was cancelled; `berth gpu via {}` shows its API",
            title(&gpu),
            gpu.summary.index
        );
    }
    out.answer(&via, |via| format!("{}: {}\n", title(&gpu), via_text(via)))
}

/// The API, and what a move to the other one waits for.
pub(crate) fn via_text(via: &Via) -> String {
    let mut text = match &via.state {
        ViaState::DevicePlugin => "device-plugin".to_owned(),
        ViaState::ToDra => "device-plugin, to be moved to dra".to_owned(),
        ViaState::Dra => "dra".to_owned(),
        ViaState::ToDevicePlugin => "dra, to be moved to device-plugin".to_owned(),
        ViaState::Other(state) => state.clone(),
    };
    if let Some(by) = &via.by {
        text += &format!(", ordered by {by}");
    }
    if let Some(why) = &via.why {
        text += &format!(" ({why})");
    }
    if let Some(waits_for) = &via.waits_for {
        text += &format!("; waits: {waits_for}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_order_is_shown_with_its_author_and_what_it_waits_for() {
        let via = |value| via_text(&serde_json::from_value(value).unwrap());
        assert_eq!(via(json!({"api": "devicePlugin", "state": "devicePlugin"})), "device-plugin");
        let moving = json!({
            "api": "dra", "state": "toDevicePlugin", "by": "ann", "why": "old jobs",
            "waitsFor": "allocation 5eed0001-17 has not ended",
        });
        assert_eq!(
            via(moving),
            "dra, to be moved to device-plugin, ordered by ann (old jobs); waits: allocation 5eed0001-17 has not ended"
        );
    }
}
