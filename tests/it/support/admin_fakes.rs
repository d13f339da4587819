//! Fakes of the ports for the admin API: a store that can be made to fail, and policies that follow their bytes and
//! parameters.

use crate::support::gpus::{SHARED, resource};
use crate::support::kubelet_fakes::MapStore;
use berth_kernel::ids::names::Digest;
use berth_kernel::ids::time::Now;
use berth_kernel::node::ports::{
    Call, CallOutput, InstallError, PolicyFiles, PolicyRuntime, Store, StoreError,
};
use berth_kernel::node::record::{Record, Write};
use berth_kernel::policy::hooks::{Answer, Fault, FaultKind, Hook, OfferAnswer, Question};
use berth_kernel::policy::version::PolicyVersion;
use berth_kernel::sharing::offer::{Consumes, OfferLine, PartOffer};
use serde_json::Value;
use sha2::{Digest as _, Sha256};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

/// A store in memory that fails while its switch is on.
#[derive(Default)]
pub(crate) struct SwitchStore {
    inner: MapStore,
    pub(crate) fails: Arc<AtomicBool>,
    /// While it is locked, every append waits.
    pub(crate) held: Arc<Mutex<()>>,
}

impl SwitchStore {
    fn check(&self) -> Result<(), StoreError> {
        if self.fails.load(Ordering::SeqCst) {
            return Err(StoreError::Io { path: "/state".into(), what: "No space left on device".into() });
        }
        Ok(())
    }
}

impl Store for SwitchStore {
    fn load(&mut self) -> Result<Vec<Record>, StoreError> {
        self.check()?;
        self.inner.load()
    }

    fn append(&mut self, writes: &[Write]) -> Result<(), StoreError> {
        drop(self.held.lock().unwrap());
        self.check()?;
        self.inner.append(writes)
    }

    fn path(&self) -> String {
        "/state".into()
    }
}

pub(crate) fn digest_of(module: &[u8]) -> Digest {
    let hex: String = Sha256::digest(module).iter().map(|b| format!("{b:02x}")).collect();
    Digest::parse(&hex).unwrap()
}

/// A module that [`MemoryPolicies`] takes.
pub(crate) fn module(name: &str, more: &str) -> Vec<u8> {
    format!("\0asm {name} {more}").into_bytes()
}

/// Keeps modules that begin as WebAssembly does; the first word after that is the name. Their one
/// hook is `offer`: `{"shares": N}` offers each GPU as N shares, `{"fail": true}` traps.
#[derive(Default)]
pub(crate) struct MemoryPolicies {
    modules: Mutex<BTreeMap<Digest, Vec<u8>>>,
    /// While true, `install` waits.
    hold: Mutex<bool>,
    changed: Condvar,
    held: AtomicUsize,
    /// While true, nothing can be made callable, since the compiler is at work.
    pub(crate) busy: AtomicBool,
    /// While true, every call traps.
    pub(crate) broken: AtomicBool,
    /// While it is locked, every call waits.
    pub(crate) calls: Mutex<()>,
    /// Calls so far, those that wait among them.
    pub(crate) asked: AtomicUsize,
}

impl MemoryPolicies {
    /// Whether an install waits for the hold to end.
    pub(crate) fn waiting(&self) -> bool {
        self.waiters() > 0
    }

    /// How many installs wait.
    pub(crate) fn waiters(&self) -> usize {
        self.held.load(Ordering::SeqCst)
    }

    /// Damages the last byte of a module, and returns the undamaged module.
    pub(crate) fn spoil(&self, digest: &Digest) -> Vec<u8> {
        let mut modules = self.modules.lock().unwrap();
        let module = modules.get_mut(digest).unwrap();
        let good = module.clone();
        *module.last_mut().unwrap() ^= 1;
        good
    }

    /// Restores a damaged module.
    pub(crate) fn mend(&self, module: Vec<u8>) {
        self.modules.lock().unwrap().insert(digest_of(&module), module);
    }

    pub(crate) fn set_hold(&self, hold: bool) {
        *self.hold.lock().unwrap() = hold;
        self.changed.notify_all();
    }
}

impl MemoryPolicies {
    fn answer(&self, call: Call<'_>) -> Result<Option<Answer>, Fault> {
        self.asked.fetch_add(1, Ordering::SeqCst);
        let _turn = self.calls.lock().unwrap();
        let parameters: Value = serde_json::from_str(call.parameters).unwrap();
        if parameters["fail"] == true || self.broken.load(Ordering::SeqCst) {
            return Err(Fault { kind: FaultKind::Trap, detail: "unreachable".into() });
        }
        if parameters["slow"] == true {
            return Err(Fault { kind: FaultKind::Time, detail: "ran longer than 500 ms".into() });
        }
        let (Question::Offer, Some(count)) = (call.question, parameters["shares"].as_u64()) else {
            return Ok(None);
        };
        let line = OfferLine {
            resource: resource(SHARED),
            count: u32::try_from(count).unwrap(),
            consumes: Consumes::Slice { memory_mib: 0, compute_percent: 0 },
        };
        let offer = |part: &_| PartOffer { part: Clone::clone(part), lines: vec![line.clone()] };
        let parts = call.node.parts.keys().map(offer).collect();
        Ok(Some(Answer::Offer(OfferAnswer { parts, again_after_s: None })))
    }
}

impl PolicyFiles for MemoryPolicies {
    fn install(&self, module: &[u8], now: Now) -> Result<PolicyVersion, InstallError> {
        self.held.fetch_add(1, Ordering::SeqCst);
        let hold = self.hold.lock().unwrap();
        drop(self.changed.wait_while(hold, |hold| *hold).unwrap());
        self.held.fetch_sub(1, Ordering::SeqCst);
        let text = module.strip_prefix(b"\0asm ").map(String::from_utf8_lossy);
        let text = text.ok_or(InstallError::NotAPolicy { what: "it is no WebAssembly".into() })?;
        let digest = digest_of(module);
        self.modules.lock().unwrap().insert(digest.clone(), module.to_vec());
        Ok(PolicyVersion {
            name: text.split(' ').next().unwrap().into(),
            version: "0.1.0".into(),
            summary: "Does what its parameters say.".into(),
            hooks: vec![Hook::Offer],
            parameters_schema: r#"{"type":"object"}"#.into(),
            artifact: digest.clone(),
            digest,
            bytes: module.len() as u64,
            shipped: false,
            since_wall_ms: now.wall_ms,
            origin: berth_kernel::policy::version::Origin::default(),
        })
    }

    fn read(&self, digest: &Digest, from: u64, bytes_max: usize) -> Result<Vec<u8>, InstallError> {
        let modules = self.modules.lock().unwrap();
        let all = modules.get(digest).ok_or_else(|| InstallError::Lost { digest: digest.clone() })?;
        let from = usize::try_from(from).unwrap().min(all.len());
        Ok(all[from..].iter().copied().take(bytes_max).collect())
    }

    fn read_all(&self, digest: &Digest) -> Result<Vec<u8>, InstallError> {
        let modules = self.modules.lock().unwrap();
        modules.get(digest).cloned().ok_or_else(|| InstallError::Lost { digest: digest.clone() })
    }

    fn remove(&self, digest: &Digest) {
        self.modules.lock().unwrap().remove(digest);
    }
}

impl PolicyRuntime for MemoryPolicies {
    fn load(&self, version: &PolicyVersion) -> Result<PolicyVersion, InstallError> {
        if self.busy.load(Ordering::SeqCst) { Err(InstallError::Busy) } else { Ok(version.clone()) }
    }

    fn call(&self, call: Call<'_>) -> CallOutput {
        self.answer(call).into()
    }
}
