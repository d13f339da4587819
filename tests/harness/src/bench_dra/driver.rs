//! The sockets of a DRA driver, called as a kubelet calls them.

use anyhow::{Context as _, Result, ensure};
use berth_proto::dra::dra_plugin_client::DraPluginClient;
use berth_proto::dra::{Claim, NodePrepareResourcesRequest, NodeUnprepareResourcesRequest};
use berth_proto::plugin_registration::registration_client::RegistrationClient;
use berth_proto::plugin_registration::{InfoRequest, PluginInfo, RegistrationStatus};
use fakes::plugin::channel;
use futures_util::future::join_all;
use std::path::Path;
use std::time::{Duration, Instant};
use tokio::time::sleep;
use tonic::transport::Channel;

/// Longer than a driver takes to serve its sockets.
const PATIENCE: Duration = Duration::from_secs(60);
/// The interval at which the folder of the sockets is read.
const LOOK: Duration = Duration::from_millis(20);

/// A registered driver, and the kubelet's connection to it.
pub(crate) struct Driver {
    client: DraPluginClient<Channel>,
}

impl Driver {
    /// Waits until a driver of this name serves a socket in the folder, and registers it, as the kubelet's watcher of
    /// plugins does.
    pub(crate) async fn registered(folder: &Path, name: &str) -> Result<Self> {
        let until = Instant::now() + PATIENCE;
        let (mut registration, info) = loop {
            if let Some(found) = find(folder, name).await? {
                break found;
            }
            ensure!(Instant::now() < until, "no socket in {} is that of the driver {name}", folder.display());
            sleep(LOOK).await;
        };
        let channel = channel(Path::new(&info.endpoint)).await?;
        let status = RegistrationStatus { plugin_registered: true, error: String::new() };
        registration.notify_registration_status(status).await?;
        Ok(Self { client: DraPluginClient::new(channel) })
    }

    /// Prepares a claim. Answers how long the call took.
    pub(crate) async fn prepare(&self, claim: &Claim) -> Result<Duration> {
        let mut client = self.client.clone();
        let request = NodePrepareResourcesRequest { claims: vec![claim.clone()] };
        let began = Instant::now();
        let response = client.node_prepare_resources(request).await?;
        let took = began.elapsed();
        let mut answers = response.into_inner().claims;
        let answer =
            answers.remove(&claim.uid).with_context(|| format!("no answer for claim {}", claim.name))?;
        ensure!(answer.error.is_empty(), "claim {} is not prepared: {}", claim.name, answer.error);
        let is_passed = answer.devices.iter().any(|device| !device.cdi_device_ids.is_empty());
        ensure!(is_passed, "claim {} has no CDI device: {answer:?}", claim.name);
        Ok(took)
    }

    /// Prepares claims of different pods at once: a call each. Answers how long it took until all calls were answered,
    /// and how many claims were not prepared.
    pub(crate) async fn prepare_at_once(&self, claims: &[Claim]) -> (Duration, usize) {
        let began = Instant::now();
        let answers = join_all(claims.iter().map(|claim| self.prepare(claim))).await;
        let took = began.elapsed();
        let errors: Vec<_> = answers.into_iter().filter_map(Result::err).collect();
        if let Some(error) = errors.first() {
            println!("  {} of {} claims are not prepared, the first: {error:#}", errors.len(), claims.len());
        }
        (took, errors.len())
    }

    /// Unprepares claims, one after another. Answers how long the calls took.
    pub(crate) async fn unprepare(&self, claims: &[Claim]) -> Result<Duration> {
        let mut client = self.client.clone();
        let mut took = Duration::ZERO;
        for claim in claims {
            let request = NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
            let began = Instant::now();
            let response = client.node_unprepare_resources(request).await?;
            took += began.elapsed();
            let error = response.into_inner().claims.remove(&claim.uid).map(|answer| answer.error);
            ensure!(error.as_deref() == Some(""), "claim {} is not unprepared: {error:?}", claim.name);
        }
        Ok(took)
    }
}

/// The socket in the folder that answers with this driver's name.
async fn find(folder: &Path, name: &str) -> Result<Option<(RegistrationClient<Channel>, PluginInfo)>> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        // The kubelet ignores hidden files; a driver may bind its socket under such a name first.
        let is_hidden = entry.file_name().as_encoded_bytes().starts_with(b".");
        if is_hidden || entry.path().extension().is_none_or(|end| end != "sock") {
            continue;
        }
        // A driver that has just bound its socket may not accept yet.
        let Ok(channel) = channel(&entry.path()).await else { continue };
        let mut client = RegistrationClient::new(channel);
        let Ok(answer) = client.get_info(InfoRequest {}).await else { continue };
        let info = answer.into_inner();
        if info.name == name {
            return Ok(Some((client, info)));
        }
    }
    Ok(None)
}
