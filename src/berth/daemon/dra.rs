//! The DRA driver: the kubelet's calls of it and the claims of the API server, joined.

use super::Base;
use berth_api::Dra;
use berth_cluster::{ApiServer, Claims, DraTask, SlicesState, TaintRulesState, marks_of_rules};
use berth_kernel::drain::marks::Owners;
use berth_kernel::grants::claim::ClaimOfServer;
use berth_kernel::node::command::Command;
use berth_kernel::sharing::via::KubeletApi;
use berth_kubelet::CurrentEdits;
use berth_kubelet::dra::{
    ClaimReader, DraDriver, DriverRegistration, DriverSettings, GONE_AFTER, HOLDER_WAIT_MAX, RunningDriver,
};
use std::collections::BTreeSet;
use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use tokio::sync::watch;

/// The channels between driver and API server, which exist before either starts.
pub(super) struct DraChannels {
    registered: watch::Sender<bool>,
    registration: watch::Sender<DriverRegistration>,
    slices: watch::Sender<SlicesState>,
    taint_rules: watch::Sender<TaintRulesState>,
}

impl DraChannels {
    pub(super) fn new() -> Self {
        Self {
            registered: watch::Sender::new(false),
            registration: watch::Sender::new(DriverRegistration::Waiting),
            slices: watch::Sender::default(),
            taint_rules: watch::Sender::default(),
        }
    }

    /// What the API shows of the driver with this name at each call, and the owners of the marks of the DeviceTaintRules that
    /// exist.
    fn facts(&self, driver: String) -> impl Fn() -> (Dra, Arc<BTreeSet<String>>) + Send + use<> {
        let (registration, slices) = (self.registration.subscribe(), self.slices.subscribe());
        let taint_rules = self.taint_rules.subscribe();
        move || {
            let why = match &*registration.borrow() {
                DriverRegistration::Registered => None,
                DriverRegistration::Waiting => Some("the kubelet has not called it yet".to_owned()),
                DriverRegistration::Disconnected => Some(
                    "the kubelet is not connected to the driver, since the kubelet was stopped or is restarting".to_owned(),
                ),
                DriverRegistration::Failed(why) => Some(why.clone()),
            };
            let slices = slices.borrow().clone();
            let SlicesState { generation, devices, moving: _, drops_taints, no_shares, no_counters, error } =
                slices;
            let TaintRulesState { owners, error: taint_rules_error } = taint_rules.borrow().clone();
            let dra = Dra {
                driver: driver.clone(),
                registered: why.is_none(),
                why,
                generation,
                devices,
                drops_taints,
                no_shares,
                no_counters,
                slices_error: error,
                taint_rules_error,
            };
            (dra, owners)
        }
    }
}

/// Claims by way of the API server's client.
struct ServerClaims(Claims);

impl ClaimReader for ServerClaims {
    fn read<'r>(
        &'r self,
        namespace: &'r str,
        name: &'r str,
    ) -> Pin<Box<dyn Future<Output = Result<Option<ClaimOfServer>, String>> + Send + 'r>> {
        Box::pin(self.0.read(namespace, name))
    }
}

impl Base {
    /// Shows the driver in the API, if it is enabled.
    pub(super) fn show_driver(&self) {
        if self.config.dra.enabled {
            self.progress.set_dra(Box::new(self.dra.facts(self.config.dra.driver.clone())));
        }
    }

    /// If the driver is not enabled, removes the marks of DeviceTaintRules: the daemon watches no rules then, so nothing else would
    /// remove them.
    pub(super) async fn remove_marks_of_rules(&self) {
        if self.config.dra.enabled {
            return;
        }
        let ledger = self.kernel().snapshot();
        for (gpu, owner, _) in marks_of_rules(&ledger) {
            let command = Command::Uncordon { gpu: gpu.clone(), owners: Owners::One(owner.clone()) };
            match self.kernel().execute(command).await {
                Ok(_) => {
                    tracing::info!(%gpu, %owner, "the mark of a DeviceTaintRule was removed, since `dra.enabled` is false");
                }
                Err(error) => {
                    tracing::warn!(
                        %gpu, %error,
                        "the mark of a DeviceTaintRule could not be removed: run `berth gpu uncordon {gpu} --owner {owner}`"
                    );
                }
            }
        }
    }

    /// If the driver is not enabled, logs which GPUs need it.
    pub(super) fn warn_without_driver(&self) {
        if self.config.dra.enabled {
            return;
        }
        let ledger = self.kernel().snapshot();
        for (gpu, state) in ledger.gpus.iter().filter(|(_, state)| state.via.api == KubeletApi::Dra) {
            tracing::warn!(
                %gpu, via = state.via.as_str(),
                "the GPU is granted through DRA, and the DRA driver is not enabled, so nothing is granted on it: set \
                 `dra.enabled: true`, and move it with `berth gpu via`"
            );
        }
    }

    /// The settings with which the client of the API server publishes ResourceSlices; `None` if the DRA driver is not enabled
    /// or no API server is configured.
    pub(super) fn dra_task(&self) -> Option<DraTask> {
        let is_on = self.config.dra.enabled && self.config.cluster.api_server != ApiServer::Off;
        is_on.then(|| DraTask {
            driver: self.config.dra.driver.clone(),
            registered: self.dra.registered.subscribe(),
            slices: self.dra.slices.clone(),
            taint_rules: self.dra.taint_rules.clone(),
        })
    }

    /// Serves and registers the driver, if it is enabled.
    pub(super) fn start_driver(&mut self, claims: Claims, edits: CurrentEdits) -> Option<RunningDriver> {
        self.dra_task()?;
        let settings = DriverSettings {
            driver: self.config.dra.driver.clone(),
            node: self.config.node.name.clone(),
            root_dir: self.config.kubelet.root_dir.clone(),
            cdi_dir: self
                .config
                .containers
                .cdi
                .folders
                .last()
                .cloned()
                .unwrap_or_else(|| PathBuf::from("/var/run/cdi")),
            edits,
            wait_max: HOLDER_WAIT_MAX,
            gone_after: GONE_AFTER,
            connections: self.options.timeouts.connections,
        };
        let driver = DraDriver::new(settings, self.kernel().clone(), Arc::new(ServerClaims(claims))).start();
        let (mut registration, registered) = (driver.registration(), self.dra.registered.clone());
        let shown = self.dra.registration.clone();
        self.tasks.spawn(async move {
            loop {
                let state = registration.borrow_and_update().clone();
                // While the kubelet restarts, the slices are kept up to date, too, so a disconnected driver counts as registered.
                let was_registered =
                    matches!(state, DriverRegistration::Registered | DriverRegistration::Disconnected);
                registered.send_replace(was_registered);
                shown.send_replace(state);
                if registration.changed().await.is_err() {
                    return;
                }
            }
        });
        Some(driver)
    }
}
