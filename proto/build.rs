//! Compiles the `.proto` files into `OUT_DIR` with protox, a protobuf compiler in Rust: `protoc` is not
//! needed, and no generated Rust is in git.

const PROTOS: [&str; 4] =
    ["deviceplugin_v1beta1.proto", "podresources_v1.proto", "pods_v1alpha1.proto", "corev1_pod.proto"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for proto in PROTOS {
        println!("cargo::rerun-if-changed={proto}");
    }
    let descriptors = protox::compile(PROTOS, ["."])?;
    tonic_prost_build::configure()
        .build_client(true)
        .build_server(true)
        // Both sides dial and listen on unix sockets themselves: no TCP helpers.
        .build_transport(false)
        .emit_rerun_if_changed(false)
        .compile_fds(descriptors)?;
    Ok(())
}
