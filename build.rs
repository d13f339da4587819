//! Compiles `proto/` into `OUT_DIR` with protox, a protobuf compiler in Rust:
//! nobody needs `protoc`, and no generated Rust is in git.

const PROTOS: [&str; 4] =
    ["deviceplugin_v1beta1.proto", "podresources_v1.proto", "pods_v1alpha1.proto", "corev1_pod.proto"];
const PROTO_DIR: &str = "proto";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed={PROTO_DIR}");
    let descriptors = protox::compile(PROTOS, [PROTO_DIR])?;
    tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        // We dial and listen on unix sockets ourselves, so no TCP helpers.
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    Ok(())
}
