//! The handle that tests hold: start, stop, pods, and a look at everything.

use crate::life::Life;
use crate::process::{Process, end_runtime, listen_pod_resources, listen_registration, remove_sockets};
use crate::world::{World, lock};
use std::{
    collections::BTreeSet,
    fs, io,
    path::PathBuf,
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

/// How the stand-in behaves, fixed for its life.
#[derive(Clone, Debug)]
pub struct Options {
    /// The folder that holds `device-plugins/` and `pod-resources/`.
    pub kubelet_dir: PathBuf,
    /// Decides every order that is random in the kubelet.
    pub seed: u64,
    /// How long a resource outlives its plugin; 5 minutes in the kubelet.
    pub endpoint_grace: Duration,
    /// How long Register tries to dial the plugin; 10 s in the kubelet.
    pub dial_limit: Duration,
    /// A first device list later than this is an anomaly. The kubelet itself waits
    /// for ever; 5 s of no devices is what we would not forgive.
    pub first_list_limit: Duration,
    /// Time between closing a plugin's connection and telling the manager. It is
    /// scheduling luck in the kubelet; long here, so that it is always hit.
    pub disconnect_gap: Duration,
    /// The end of an old stream disconnects whoever has its name, as in 1.36.
    pub name_keyed_race: bool,
    /// Time between bind and listen of a socket, in which a dial is refused.
    pub bind_gap: Duration,
    /// The feature gate `PodsAPI`; off by default, as in 1.36.
    pub pods_api: bool,
}

impl Options {
    /// The kubelet's own values.
    pub fn new(kubelet_dir: impl Into<PathBuf>) -> Self {
        Self {
            kubelet_dir: kubelet_dir.into(),
            seed: 1,
            endpoint_grace: Duration::from_secs(300),
            dial_limit: Duration::from_secs(10),
            first_list_limit: Duration::from_secs(5),
            disconnect_gap: Duration::from_millis(50),
            name_keyed_race: true,
            bind_gap: Duration::ZERO,
            pods_api: false,
        }
    }
}

/// What a starting kubelet knows of its pods.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sources {
    /// The API server answered: every pod is known.
    Ready,
    /// The API server is away: these UIDs are known (static pods, say), and nobody
    /// is purged. `List` shows only these.
    Waiting {
        /// UIDs known.
        known: Vec<String>,
    },
}

/// A stand-in kubelet. Cheap to clone; all clones are the same one.
#[derive(Clone, Debug)]
pub struct Kubelet {
    world: Arc<World>,
    process: Arc<Mutex<Option<Process>>>,
}

impl Kubelet {
    /// A kubelet that does not run yet.
    pub fn new(options: Options) -> Self {
        Self { world: Arc::new(World::new(options)), process: Arc::default() }
    }

    /// A kubelet with the usual options, running.
    pub async fn started(kubelet_dir: impl Into<PathBuf>) -> io::Result<Self> {
        let kubelet = Self::new(Options::new(kubelet_dir));
        kubelet.start().await?;
        Ok(kubelet)
    }

    pub(crate) fn world(&self) -> &Arc<World> {
        &self.world
    }

    /// The process, if one runs.
    pub(crate) fn life(&self) -> Option<Arc<Life>> {
        lock(&self.process).as_ref().map(|p| Arc::clone(&p.life))
    }

    /// Starts with every pod known.
    pub async fn start(&self) -> io::Result<()> {
        self.start_with(Sources::Ready).await
    }

    /// Starts: reads the checkpoint, deletes every socket in `device-plugins/`, keeps
    /// all other files, listens.
    pub async fn start_with(&self, sources: Sources) -> io::Result<()> {
        if self.life().is_some() {
            return Err(io::Error::other("this stand-in kubelet runs already"));
        }
        let (plugins, pods) = (self.world.device_plugins(), self.world.pod_resources());
        fs::create_dir_all(&plugins)?;
        fs::create_dir_all(&pods)?;
        let (known, ready) = match sources {
            Sources::Ready => (lock(&self.world.pods).keys().cloned().collect(), true),
            Sources::Waiting { known } => (known.into_iter().collect::<BTreeSet<_>>(), false),
        };
        let life = Arc::new(Life::begin(Arc::clone(&self.world), known, ready));
        remove_sockets(&plugins)?;
        let process = Process::begin(life).await?;
        *lock(&self.process) = Some(process);
        self.world.touch();
        Ok(())
    }

    /// Ends the process: every connection closes, the socket files stay behind.
    pub async fn stop(&self) {
        let Some(process) = lock(&self.process).take() else {
            return;
        };
        process.end().await;
        self.world.touch();
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

    /// The API server answers at last: every pod is known and the dead are purged.
    pub fn sources_ready(&self) {
        if let Some(life) = self.life() {
            let all: Vec<String> = lock(&self.world.pods).keys().cloned().collect();
            lock(&life.known).extend(all);
            life.sources_ready.store(true, Ordering::SeqCst);
            self.world.touch();
        }
    }

    /// Makes `kubelet.sock` anew in the same process, as kubelets that retry their
    /// own server do. Clients and devices stay. With `wipe`, plugins' sockets go.
    pub async fn recreate_socket(&self, wipe: bool) -> io::Result<()> {
        let plugins = self.world.device_plugins();
        if wipe {
            remove_sockets(&plugins)?;
        } else {
            fs::remove_file(plugins.join("kubelet.sock"))?;
        }
        let (life, handle) = {
            let process = lock(&self.process);
            let process = process.as_ref().ok_or_else(|| io::Error::other("no kubelet runs"))?;
            process.registration.abort();
            (Arc::clone(&process.life), process.handle.clone())
        };
        let serving = listen_registration(&handle, &life).await?;
        if let Some(process) = lock(&self.process).as_mut() {
            process.registration = serving;
        }
        self.world.touch();
        Ok(())
    }

    /// The pod resources server dies; its socket file stays and refuses dials.
    pub async fn kill_pod_resources(&self) {
        let runtime = lock(&self.process).as_mut().and_then(|p| p.pod_resources.take());
        if let Some(runtime) = runtime {
            end_runtime(runtime).await;
        }
    }

    /// It comes back, on a new socket.
    pub async fn revive_pod_resources(&self) -> io::Result<()> {
        let Some(life) = self.life() else {
            return Err(io::Error::other("no kubelet runs"));
        };
        let runtime = listen_pod_resources(&life).await?;
        let old = lock(&self.process).as_mut().and_then(|p| p.pod_resources.replace(runtime));
        if let Some(old) = old {
            end_runtime(old).await;
        }
        Ok(())
    }

    /// The kubelet loses its connection to the plugin of `resource`.
    pub fn drop_stream(&self, resource: &str) {
        if let Some(life) = self.life() {
            let client = lock(&life.clients).get(resource).cloned();
            if let Some(client) = client {
                client.close();
            }
        }
    }
}
