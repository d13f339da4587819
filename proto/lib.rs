//! The gRPC APIs of the kubelet, the messages of the container runtime's plugins, and those between guard and daemon. The
//! Rust in `generated` is made from the `.proto` files beside this file, and is in git so that no build has to compile a
//! protobuf compiler. After a change of a `.proto` file
//! `UPDATE_EXPECT=1 cargo test -p berth-proto` makes it again; without the variable that test fails if it is not current.

/// The device plugin API.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1beta1 {
    include!("generated/v1beta1.rs");
}

/// The Pods API, and the health of DRA devices as kubelets before 1.40 ask for it.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1alpha1 {
    include!("generated/v1alpha1.rs");
}

/// The container runtime's Node Resource Interface.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod nri {
    include!("generated/nri.pkg.api.v1alpha1.rs");
}

/// What ttrpc sends in its frames.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod ttrpc {
    include!("generated/ttrpc.rs");
}

/// What the guard and the daemon say to each other.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod guard {
    include!("generated/berth.guard.v1.rs");
}

/// The parts of a core/v1 Pod that are read.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod core {
    include!("generated/k8s.io.api.core.v1.rs");
}

/// The pod resources API, and the health of DRA devices.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod v1 {
    include!("generated/v1.rs");
}

/// The API of DRA drivers.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod dra {
    include!("generated/k8s.io.kubelet.pkg.apis.dra.v1.rs");
}

/// The registration of plugins that the kubelet finds by their sockets.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used)]
pub mod plugin_registration {
    include!("generated/pluginregistration.rs");
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::path::Path;

    /// The names and contents of the files of a folder.
    fn files(folder: &Path) -> BTreeMap<String, String> {
        let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        entries
            .map(|path| {
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                (name, fs::read_to_string(&path).unwrap())
            })
            .collect()
    }

    #[test]
    fn the_generated_rust_is_that_of_the_proto_files() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let paths = fs::read_dir(here).unwrap().map(|entry| entry.unwrap().path());
        let mut protos: Vec<_> =
            paths.filter(|path| path.extension().is_some_and(|e| e == "proto")).collect();
        protos.sort();
        // protox is a protobuf compiler in Rust: `protoc` is not needed.
        let descriptors = protox::compile(&protos, [here]).unwrap();
        let out = tempfile::tempdir().unwrap();
        tonic_prost_build::configure()
            // Both sides dial and listen on unix sockets themselves: no TCP helpers.
            .build_transport(false)
            .emit_rerun_if_changed(false)
            .out_dir(out.path())
            .compile_fds(descriptors)
            .unwrap();
        let generated = here.join("generated");
        if std::env::var_os("UPDATE_EXPECT").is_some() {
            fs::remove_dir_all(&generated).unwrap();
            fs::create_dir(&generated).unwrap();
            for (name, text) in files(out.path()) {
                fs::write(generated.join(name), text).unwrap();
            }
        }
        let is_current = files(out.path()) == files(&generated);
        assert!(
            is_current,
            "run `UPDATE_EXPECT=1 cargo test -p berth-proto`, which makes `proto/generated` again"
        );
    }
}
