//! Berth's own CDI specification on disk: written before devices are listed that need it, and again when it was deleted
//! or when the driver, the minor numbers or the MIG instances changed.

use super::Access;
use berth_gpus::cdi::{Driver, FileState, Spec, file_state, fingerprint, generate};
use berth_kernel::hardware::device_nodes::HostFolder;
use berth_kernel::hardware::gpu::Part;
use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The file, and what it was made of.
pub(super) struct OwnSpec {
    driver: Driver,
    file: PathBuf,
    /// What the file depends on, and the file as it was written.
    written: Option<(String, FileState)>,
    /// The names that the specification has which was made last.
    names: BTreeSet<String>,
    /// What containers lack by the specification that was made last.
    warnings: Vec<String>,
}

impl OwnSpec {
    pub(super) fn new(driver: Driver, file: PathBuf) -> Self {
        Self { driver, file, written: None, names: BTreeSet::new(), warnings: Vec::new() }
    }

    /// Sets the folder of the driver, and the folders of its device nodes.
    pub(super) fn set_folders(&mut self, root: HostFolder, nodes: Vec<HostFolder>) {
        self.driver.root = root;
        self.driver.nodes = nodes;
    }

    pub(super) fn file(&self) -> &Path {
        &self.file
    }

    /// The names of its devices. A part without device nodes has none.
    pub(super) fn names(&self) -> &BTreeSet<String> {
        &self.names
    }

    /// Whether it was written by this process or an earlier one.
    pub(super) fn exists(&self) -> bool {
        self.written.is_some() || self.file.exists()
    }

    /// Writes the specification of these parts, unless the file has it already.
    pub(super) fn update(
        &mut self,
        parts: &[&Part],
        held: &BTreeSet<String>,
        access: Access,
        warnings: &mut Vec<String>,
    ) -> Result<(), String> {
        let made_of = fingerprint(parts, &self.driver).map_err(|error| error.to_string())?;
        let is_unchanged = self.written.as_ref().is_some_and(|(before, state)| {
            *before == made_of && Some(state) == file_state(&self.file).as_ref()
        });
        if !is_unchanged {
            let mut made = generate(parts, &self.driver).map_err(|error| error.to_string())?;
            self.warnings = made.warnings;
            let before = Spec::read(&self.file).ok();
            if let Some(before) = &before {
                keep_held(&mut made.spec, before, held);
            }
            if access == Access::Write {
                if before.as_ref() != Some(&made.spec) {
                    let path = self.file.display();
                    made.spec.write(&self.file).map_err(|error| {
                        let fix = match error.kind() {
                            ErrorKind::StorageFull | ErrorKind::QuotaExceeded => "free space for it",
                            _ => "mount its folder, or set cdi.folders",
                        };
                        format!("{path} cannot be written ({error}): {fix}")
                    })?;
                    tracing::info!(
                        devices = made.spec.devices.len(),
                        driver = made.driver_version,
                        "wrote the CDI specification {path}"
                    );
                }
                self.written = file_state(&self.file).map(|state| (made_of, state));
            }
            self.names = made.spec.devices.into_iter().map(|device| device.name).collect();
        }
        warnings.extend(self.warnings.iter().cloned());
        Ok(())
    }
}

/// Keeps the devices that containers hold, even if their part is gone: a container that restarts names it again, and a
/// name that is not resolved is an error of the runtime that hides the real one.
fn keep_held(spec: &mut Spec, before: &Spec, held: &BTreeSet<String>) {
    let named: BTreeSet<String> = spec.devices.iter().map(|device| device.name.clone()).collect();
    let kept =
        before.devices.iter().filter(|device| held.contains(&device.name) && !named.contains(&device.name));
    spec.devices.extend(kept.cloned());
    spec.cdi_version = spec.least_version().into();
    spec.sort();
}
