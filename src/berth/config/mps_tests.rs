//! `containerEdits.resources.<resource>.mps`.

use crate::config::{Config, FileConfig, ServeArgs};
use berth_kernel::names::Resource;
use berth_kubelet::Edits;
use std::path::Path;

const SHARED: &str = "nvidia.com/gpu.shared";

fn edits(yaml: &str) -> Result<Edits, String> {
    let file = FileConfig::parse(&format!("containerEdits: {{resources: {{{SHARED}: {{mps: {yaml}}}}}}}"))
        .map_err(|e| e.to_string())?;
    Config::merge(&ServeArgs::default(), file).map(|c| c.edits).map_err(|e| e.to_string())
}

#[test]
fn the_configuration_names_the_daemons_folders() {
    let edits = edits("{pipeDirectory: /run/mps, containerPipeDirectory: /mps}").unwrap();
    let shared = Resource::parse(SHARED).unwrap();
    let mps = edits.resources[&shared].mps.clone().unwrap();
    assert_eq!((mps.inner_pipe_directory(), mps.shm.as_str()), ("/mps", "/dev/shm"));
    assert_eq!(edits.mps_sockets()[&shared], Path::new("/run/mps/control"));
    assert!(Edits::default().mps_sockets().is_empty());
}

#[test]
fn a_wrong_configuration_is_refused() {
    for (yaml, expected) in [
        ("{}", "pipeDirectory"),
        ("{pipeDirectory: run/mps}", "absolute"),
        ("{pipeDirectory: /run/mps, shm: /a/../b}", "absolute"),
        ("{pipeDirectory: /run/mps, pipes: /x}", "pipes"),
    ] {
        let error = edits(yaml).unwrap_err();
        assert!(error.contains(expected), "{yaml}: {error}");
    }
}
