//! The handle for tests: starts and stops the kubelet and its sockets.

use crate::kubelet_state::KubeletState;
use crate::node_state::{NodeState, lock};
use crate::process::{Process, end_runtime, listen_pod_resources, listen_registration, remove_sockets};
use std::{
    collections::BTreeSet,
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

/// How the stand-in behaves; fixed at its creation.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder that holds `device-plugins/`: /var/lib/kubelet of every kubelet.
    pub kubelet_dir: PathBuf,
    /// The `--root-dir`, which holds `pod-resources/`; by default the same.
    pub root_dir: PathBuf,
    /// Determines every order that is random in the kubelet.
    pub seed: u64,
    /// How long a resource is kept after its plugin's disconnect; 5 minutes in the kubelet.
    pub endpoint_grace: Duration,
    /// How long Register tries to dial the plugin; 10 s in the kubelet.
    pub dial_limit: Duration,
    /// A first device list later than this is an anomaly: a node without devices for 5 s is a
    /// defect, although the kubelet itself has no limit.
    pub first_list_limit: Duration,
    /// The time between closing a plugin's connection and notifying the manager. In the
    /// kubelet it depends on scheduling; long here, so that tests always hit it.
    pub disconnect_gap: Duration,
    /// Whether the end of an old stream disconnects the current client of its resource name, as in 1.36.
    pub name_keyed_race: bool,
    /// The time between bind and listen of a socket, in which a dial is refused.
    pub bind_gap: Duration,
    /// The time from a pod's arrival, which the Pods API shows, to its Allocate calls. In the kubelet it depends on its
    /// other work.
    pub admission_wait: Duration,
    /// The feature gate `PodsAPI`; off by default, as in 1.36.
    pub pods_api: bool,
}

impl Options {
    /// The kubelet's values.
    pub fn new(kubelet_dir: impl Into<PathBuf>) -> Self {
        let kubelet_dir = kubelet_dir.into();
        Self {
            root_dir: kubelet_dir.clone(),
            kubelet_dir,
            seed: 1,
            endpoint_grace: Duration::from_secs(300),
            dial_limit: Duration::from_secs(10),
            first_list_limit: Duration::from_secs(5),
            disconnect_gap: Duration::from_millis(50),
            name_keyed_race: true,
            bind_gap: Duration::ZERO,
            admission_wait: Duration::ZERO,
            pods_api: false,
        }
    }
}

/// Which pods a starting kubelet knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sources {
    /// The API server has answered: every pod is known.
    Ready,
    /// The API server is unavailable: only these pods are known (static pods, for example) and in
    /// `List`, and no pod is purged.
    Waiting {
        /// The known UIDs.
        known: Vec<String>,
    },
}

/// A stand-in kubelet. Cheap to clone; all clones share one kubelet.
#[derive(Clone, Debug)]
pub struct Kubelet {
    node: Arc<NodeState>,
    process: Arc<Mutex<Option<Process>>>,
}

impl Kubelet {
    /// A kubelet that is not started yet.
    pub fn new(options: Options) -> Self {
        Self { node: Arc::new(NodeState::new(options)), process: Arc::default() }
    }

    /// A running kubelet with default options.
    pub async fn started(kubelet_dir: impl Into<PathBuf>) -> io::Result<Self> {
        let kubelet = Self::new(Options::new(kubelet_dir));
        kubelet.start().await?;
        Ok(kubelet)
    }

    pub(crate) fn node(&self) -> &Arc<NodeState> {
        &self.node
    }

    /// The state of the running process, if any.
    pub(crate) fn state(&self) -> Option<Arc<KubeletState>> {
        lock(&self.process).as_ref().map(|p| Arc::clone(&p.state))
    }

    /// Starts with every pod known.
    pub async fn start(&self) -> io::Result<()> {
        self.start_with(Sources::Ready).await
    }

    /// Starts: reads the checkpoint, deletes every socket in `device-plugins/` but no other
    /// file, and listens.
    pub async fn start_with(&self, sources: Sources) -> io::Result<()> {
        if self.state().is_some() {
            return Err(io::Error::other("this stand-in kubelet is already running"));
        }
        let (plugins, pods) = (self.node.device_plugins(), self.node.pod_resources());
        fs::create_dir_all(&plugins)?;
        fs::create_dir_all(&pods)?;
        let (known, ready) = match sources {
            Sources::Ready => (lock(&self.node.pods).keys().cloned().collect(), true),
            Sources::Waiting { known } => (known.into_iter().collect::<BTreeSet<_>>(), false),
        };
        let state = Arc::new(KubeletState::begin(Arc::clone(&self.node), known, ready));
        remove_sockets(&plugins)?;
        let process = Process::begin(state).await?;
        *lock(&self.process) = Some(process);
        self.node.notify_changed();
        Ok(())
    }

    /// Ends the process: every connection closes, the socket files remain.
    pub async fn stop(&self) {
        let Some(process) = lock(&self.process).take() else {
            return;
        };
        process.end().await;
        self.node.notify_changed();
    }

    /// `stop`, then `start`.
    pub async fn restart(&self) -> io::Result<()> {
        self.restart_with(Sources::Ready).await
    }

    /// `stop`, then `start_with`.
    pub async fn restart_with(&self, sources: Sources) -> io::Result<()> {
        self.stop().await;
        self.start_with(sources).await
    }

    /// Makes the API server answer: every pod is known, and ended pods are purged.
    pub fn sources_ready(&self) {
        if let Some(state) = self.state() {
            let uids: Vec<String> = lock(&self.node.pods).keys().cloned().collect();
            lock(&state.known).extend(uids);
            state.sources_ready.store(true, Ordering::SeqCst);
            self.node.notify_changed();
        }
    }

    /// Creates `kubelet.sock` again in the same process, as newer kubelets do when they restart
    /// their server. Clients and devices are kept. `wipe` deletes the plugins' sockets.
    pub async fn recreate_socket(&self, wipe: bool) -> io::Result<()> {
        let plugins = self.node.device_plugins();
        if wipe {
            remove_sockets(&plugins)?;
        } else {
            fs::remove_file(plugins.join("kubelet.sock"))?;
        }
        let (state, handle) = {
            let process = lock(&self.process);
            let process = process.as_ref().ok_or_else(|| io::Error::other("no kubelet is running"))?;
            process.registration.abort();
            (Arc::clone(&process.state), process.handle.clone())
        };
        let serving = listen_registration(&handle, &state).await?;
        if let Some(process) = lock(&self.process).as_mut() {
            process.registration = serving;
        }
        self.node.notify_changed();
        Ok(())
    }

    /// Stops the pod resources server; its socket file remains and refuses dials.
    pub async fn kill_pod_resources(&self) {
        let runtime = lock(&self.process).as_mut().and_then(|p| p.pod_resources.take());
        if let Some(runtime) = runtime {
            end_runtime(runtime).await;
        }
    }

    /// Starts the pod resources server again, on a new socket.
    pub async fn revive_pod_resources(&self) -> io::Result<()> {
        let Some(state) = self.state() else {
            return Err(io::Error::other("no kubelet is running"));
        };
        let runtime = listen_pod_resources(&state).await?;
        let old = lock(&self.process).as_mut().and_then(|p| p.pod_resources.replace(runtime));
        if let Some(old) = old {
            end_runtime(old).await;
        }
        Ok(())
    }

    /// Closes the kubelet's connection to the plugin of `resource`.
    pub fn drop_stream(&self, resource: &str) {
        if let Some(state) = self.state() {
            let client = lock(&state.clients).get(resource).cloned();
            if let Some(client) = client {
                client.close();
            }
        }
    }
}
