//! The exported hooks of one version. Their indices are looked up once, so that a call checks the type of its own
//! hook only and not of all exports.

use wasmtime::component::{ComponentExportIndex, Instance, InstancePre, TypedFunc};
use wasmtime::{Result, Store};

use super::bindings::berth::policy::types as wit;
use super::guest::Guest;

type OfferHook<'a> = TypedFunc<(&'a wit::Context,), (Option<wit::OfferAnswer>,)>;
type PlaceHook<'a> = TypedFunc<(&'a wit::Context, &'a wit::PlaceRequest), (Option<wit::Placement>,)>;
type AdmitHook<'a> = TypedFunc<(&'a wit::Context, &'a wit::AdmitRequest), (Option<wit::Verdict>,)>;
type TriageHook<'a> = TypedFunc<(&'a wit::Context, &'a wit::Reading), (Option<wit::TriageAnswer>,)>;

/// The export index of each hook.
#[derive(Clone, Copy)]
pub(super) struct Exports {
    offer: ComponentExportIndex,
    place: ComponentExportIndex,
    admit: ComponentExportIndex,
    triage: ComponentExportIndex,
}

impl Exports {
    /// # Errors
    /// If a hook is missing. Types are checked at each call, and all of them when `describe` is called at
    /// installation.
    pub(super) fn find(instance: &InstancePre<Guest>) -> Result<Self> {
        let component = instance.component();
        let find = |name: &str| {
            let index = component.get_export_index(None, name);
            index.ok_or_else(|| wasmtime::format_err!("it does not export `{name}`"))
        };
        Ok(Self {
            offer: find("offer")?,
            place: find("place")?,
            admit: find("admit")?,
            triage: find("triage")?,
        })
    }
}

/// An instance with the export indices of its hooks.
pub(super) struct Hooks<'a> {
    pub(super) instance: Instance,
    pub(super) exports: &'a Exports,
}

impl Hooks<'_> {
    pub(super) fn offer(
        &self,
        store: &mut Store<Guest>,
        context: &wit::Context,
    ) -> Result<Option<wit::OfferAnswer>> {
        let hook: OfferHook<'_> = self.instance.get_typed_func(&mut *store, self.exports.offer)?;
        Ok(hook.call(store, (context,))?.0)
    }

    pub(super) fn place(
        &self,
        store: &mut Store<Guest>,
        context: &wit::Context,
        request: &wit::PlaceRequest,
    ) -> Result<Option<wit::Placement>> {
        let hook: PlaceHook<'_> = self.instance.get_typed_func(&mut *store, self.exports.place)?;
        Ok(hook.call(store, (context, request))?.0)
    }

    pub(super) fn admit(
        &self,
        store: &mut Store<Guest>,
        context: &wit::Context,
        request: &wit::AdmitRequest,
    ) -> Result<Option<wit::Verdict>> {
        let hook: AdmitHook<'_> = self.instance.get_typed_func(&mut *store, self.exports.admit)?;
        Ok(hook.call(store, (context, request))?.0)
    }

    pub(super) fn triage(
        &self,
        store: &mut Store<Guest>,
        context: &wit::Context,
        reading: &wit::Reading,
    ) -> Result<Option<wit::TriageAnswer>> {
        let hook: TriageHook<'_> = self.instance.get_typed_func(&mut *store, self.exports.triage)?;
        Ok(hook.call(store, (context, reading))?.0)
    }
}
