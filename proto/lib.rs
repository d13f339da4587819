//! The gRPC APIs of the kubelet, generated at build time from the `.proto` files beside this file:
//! messages, clients and servers.

/// The device plugin API.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1beta1 {
    tonic::include_proto!("v1beta1");
}

/// The Pods API.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1alpha1 {
    tonic::include_proto!("v1alpha1");
}

/// The parts of a core/v1 Pod that are read.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod core {
    tonic::include_proto!("k8s.io.api.core.v1");
}

/// The pod resources API.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1 {
    tonic::include_proto!("v1");
}
