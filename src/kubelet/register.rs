//! One attempt to register with the kubelet.

use super::socket_path::NoConnection;
use super::wire::v1beta1::registration_client::RegistrationClient;
use super::wire::v1beta1::{DevicePluginOptions, RegisterRequest};
use super::wire::{API_VERSION, dial};
use berth_kernel::ids::names::Resource;
use std::path::Path;
use std::time::Duration;

/// The outcome of one Register call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RegisterOutcome {
    /// The kubelet accepted the registration.
    Registered,
    /// No connection to kubelet.sock could be made.
    Unreachable(NoConnection),
    /// The kubelet returned an error, or did not answer in time. Holds the message.
    Refused(String),
}

/// Dials kubelet.sock and registers `resource`, served on `endpoint` (a file name).
pub(super) async fn register(
    kubelet: &Path,
    resource: &Resource,
    endpoint: &str,
    limit: Duration,
) -> RegisterOutcome {
    let channel = match dial(kubelet).await {
        Ok(channel) => channel,
        Err(error) => return RegisterOutcome::Unreachable(NoConnection::of_dial(kubelet, &error)),
    };
    let request = RegisterRequest {
        version: API_VERSION.to_owned(),
        endpoint: endpoint.to_owned(),
        resource_name: resource.to_string(),
        // Current kubelets ignore this and call GetDevicePluginOptions, which returns the same.
        options: Some(DevicePluginOptions {
            pre_start_required: false,
            get_preferred_allocation_available: true,
        }),
    };
    let mut client = RegistrationClient::new(channel);
    match tokio::time::timeout(limit, client.register(request)).await {
        Ok(Ok(_)) => RegisterOutcome::Registered,
        Ok(Err(status)) if status.message().is_empty() => {
            RegisterOutcome::Refused(status.code().description().to_owned())
        }
        Ok(Err(status)) => RegisterOutcome::Refused(status.message().to_owned()),
        Err(_) => RegisterOutcome::Refused(format!("no answer within {} s", limit.as_secs())),
    }
}
