//! The Registration service on `device-plugins/kubelet.sock`.

use crate::API_VERSION;
use crate::calls::Rpc;
use crate::client::connect_client;
use crate::kubelet_state::KubeletState;
use crate::node_state::lock;
use crate::proto::v1beta1::registration_server::Registration;
use crate::proto::v1beta1::{Empty, RegisterRequest};
use std::{sync::Arc, time::Instant};
use tonic::{Request, Response, Status};

pub(crate) struct RegistrationService(pub(crate) Arc<KubeletState>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let state = &self.0;
        let began = Instant::now();
        let request = request.into_inner();
        let resource = request.resource_name.clone();
        let delay = state.node.faults().register_delay;
        tokio::time::sleep(delay).await;
        if !state.is_alive() {
            // An ended process does not answer; its connections close shortly after.
            std::future::pending::<()>().await;
        }
        let result = register(state, request).await;
        state.node.record(Rpc::Register, &resource, began, result.is_err());
        result.map(Response::new)
    }
}

async fn register(state: &Arc<KubeletState>, request: RegisterRequest) -> Result<Empty, Status> {
    apply_refusal_fault(state)?;
    let RegisterRequest {
        version,
        endpoint,
        resource_name,
        // Ignored, since the kubelet calls GetDevicePluginOptions instead.
        options: _,
    } = request;
    if version != API_VERSION {
        return Err(Status::unknown(format!(
            "requested API version \"{version}\" is not supported by kubelet. Supported version is [\"{API_VERSION}\"]"
        )));
    }
    if !is_extended_resource_name(&resource_name) {
        return Err(Status::unknown(format!("the ResourceName \"{resource_name}\" is invalid")));
    }
    let socket = state.node.device_plugins().join(endpoint);
    connect_client(state, &resource_name, socket).await?;
    Ok(Empty {})
}

fn apply_refusal_fault(state: &KubeletState) -> Result<(), Status> {
    let mut faults = lock(&state.node.faults);
    if faults.refuse_registrations == 0 {
        return Ok(());
    }
    faults.refuse_registrations -= 1;
    Err(Status::unavailable("registrations are refused for now"))
}

/// The kubelet's rule for names: domain/name, not in a Kubernetes domain, and short
/// enough for the quota prefix "requests.".
fn is_extended_resource_name(name: &str) -> bool {
    const NAME_CHARS_MAX: usize = 63;
    const DOMAIN_CHARS_MAX: usize = 253;
    let Some((domain, base)) = name.split_once('/') else {
        return false;
    };
    let is_native = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    let is_domain_valid = !domain.is_empty()
        && domain.len() + "requests.".len() <= DOMAIN_CHARS_MAX
        && domain.split('.').all(|label| {
            edges_are_alphanumeric(label)
                && label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        });
    let is_base_valid = base.len() <= NAME_CHARS_MAX
        && edges_are_alphanumeric(base)
        && base.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    !is_native && !domain.starts_with("requests.") && is_domain_valid && is_base_valid
}

fn edges_are_alphanumeric(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    edge(text.chars().next()) && edge(text.chars().next_back())
}

#[cfg(test)]
mod tests {
    use super::is_extended_resource_name;

    #[test]
    fn only_qualified_names_outside_kubernetes_are_extended_resources() {
        for good in ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "a.b/c_d.e-f"] {
            assert!(is_extended_resource_name(good), "{good}");
        }
        for bad in [
            "gpu",
            "/gpu",
            "nvidia.com/",
            "kubernetes.io/gpu",
            "x.kubernetes.io/gpu",
            "requests.nvidia.com/gpu",
            "NVIDIA.com/gpu",
            "nvidia.com/gpu/a",
            "nvidia.com/-gpu",
        ] {
            assert!(!is_extended_resource_name(bad), "{bad}");
        }
    }
}
