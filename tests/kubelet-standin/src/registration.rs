//! The Registration service on `device-plugins/kubelet.sock`.

use crate::API_VERSION;
use crate::calls::Rpc;
use crate::client::connect_client;
use crate::life::Life;
use crate::proto::v1beta1::registration_server::Registration;
use crate::proto::v1beta1::{Empty, RegisterRequest};
use crate::world::lock;
use std::{sync::Arc, time::Instant};
use tonic::{Request, Response, Status};

pub(crate) struct RegistrationService(pub(crate) Arc<Life>);

#[tonic::async_trait]
impl Registration for RegistrationService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let life = &self.0;
        let began = Instant::now();
        let request = request.into_inner();
        let resource = request.resource_name.clone();
        let delay = life.world.faults().register_delay;
        tokio::time::sleep(delay).await;
        if !life.is_alive() {
            // A process that has ended answers nobody; this one's connections close a moment later.
            std::future::pending::<()>().await;
        }
        let answer = register(life, request).await;
        life.world.record(Rpc::Register, &resource, began, answer.is_err());
        answer.map(Response::new)
    }
}

async fn register(life: &Arc<Life>, request: RegisterRequest) -> Result<Empty, Status> {
    refuse_if_told(life)?;
    let RegisterRequest {
        version,
        endpoint,
        resource_name,
        // Not looked at: GetDevicePluginOptions is asked instead.
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
    let socket = life.world.device_plugins().join(endpoint);
    connect_client(life, &resource_name, socket).await?;
    Ok(Empty {})
}

fn refuse_if_told(life: &Life) -> Result<(), Status> {
    let mut faults = lock(&life.world.faults);
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
    let native = domain == "kubernetes.io" || domain.ends_with(".kubernetes.io");
    let domain_ok = !domain.is_empty()
        && domain.len() + "requests.".len() <= DOMAIN_CHARS_MAX
        && domain.split('.').all(|label| {
            edges_are_alphanumeric(label)
                && label.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
        });
    let base_ok = base.len() <= NAME_CHARS_MAX
        && edges_are_alphanumeric(base)
        && base.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'));
    !native && !domain.starts_with("requests.") && domain_ok && base_ok
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
