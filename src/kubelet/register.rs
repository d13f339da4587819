//! One try to register with the kubelet.

use super::wire::v1beta1::registration_client::RegistrationClient;
use super::wire::v1beta1::{DevicePluginOptions, RegisterRequest};
use super::wire::{API_VERSION, dial};
use berth_kernel::names::Resource;
use std::path::Path;
use std::time::Duration;

/// What came of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// The kubelet took it.
    Registered,
    /// Nobody listens behind kubelet.sock yet, or any more. In the system's words.
    NobodyThere(String),
    /// The kubelet answered no, or not in time. In its words.
    Refused(String),
}

/// Dials kubelet.sock and registers `resource`, served on `endpoint` (a file name).
pub(super) async fn register(kubelet: &Path, resource: &Resource, endpoint: &str, limit: Duration) -> Tried {
    let channel = match dial(kubelet).await {
        Ok(channel) => channel,
        Err(error) => return Tried::NobodyThere(innermost(&error)),
    };
    let request = RegisterRequest {
        version: API_VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_string(),
        // Not read by today's kubelets, which ask; both hear the same.
        options: Some(DevicePluginOptions {
            pre_start_required: false,
            get_preferred_allocation_available: true,
        }),
    };
    let mut client = RegistrationClient::new(channel);
    match tokio::time::timeout(limit, client.register(request)).await {
        Ok(Ok(_)) => Tried::Registered,
        Ok(Err(status)) => Tried::Refused(status.message().to_owned()),
        Err(_) => Tried::Refused(format!("no answer within {} s", limit.as_secs())),
    }
}

/// A transport error says only that it is one; its innermost cause says what the system said.
fn innermost(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => innermost(source),
        None => error.to_string(),
    }
}
