//! Which registration is a table's: the OID leads, the name follows (R-REG-2).

use aura_domain::Relation;
use aura_kit::request_id;
use aura_pgsource::admin::{Admin, TableInfo};
use aura_store::{Caller, Registration, Store};

use crate::{access::TableService, error::Result};

/// What is registered for the table of a request.
#[derive(Debug, Default)]
pub(super) struct Standing {
    /// Its registration; it may still have the table's old name.
    pub(super) known: Option<Registration>,
    /// For people: what became of the table that was registered under this name, or of this one's name.
    pub(super) note: Option<String>,
}

/// Looks, and writes nothing.
pub(super) async fn look(
    store: &Store,
    admin: &Admin,
    service: &TableService,
    info: Option<&TableInfo>,
) -> Result<Standing> {
    let named = store.registration(service.reference()).await?;
    if named.as_ref().is_some_and(|named| info.is_some_and(|info| info.oid == named.oid)) {
        return Ok(Standing { known: named, note: None });
    }
    if let Some(other) = renamed_to(store, service, info).await? {
        let note = format!("the table was renamed from {}; the worker follows", other.table);
        return Ok(Standing { known: Some(other), note: Some(note) });
    }
    let Some(named) = named else { return Ok(Standing::default()) };
    let Some(now) = moved_from(admin, &named).await? else { return Ok(Standing { known: Some(named), note: None }) };
    if info.is_some() {
        let note = format!("the table that was enabled under this name is {} now; this one is another", now.quoted());
        return Ok(Standing { known: None, note: Some(note) });
    }
    let note = format!("the table is {} now; the worker follows", now.quoted());
    Ok(Standing { known: Some(named), note: Some(note) })
}

/// Lets registrations follow their tables at once, as the worker would within seconds, and answers what is registered under
/// the request's name then: what is about to be changed must be this table's.
pub(super) async fn settle(
    store: &Store,
    admin: &Admin,
    service: &TableService,
    info: Option<&TableInfo>,
) -> Result<Option<Registration>> {
    let request = request_id::current();
    let caller = Caller { actor: service.access().actor().as_str(), request_id: request.as_deref() };
    let named = store.registration(service.reference()).await?;
    let same = |named: &Registration| info.is_some_and(|info| info.oid == named.oid);
    if named.as_ref().is_some_and(same) {
        return Ok(named);
    }
    let mut followed = false;
    if let Some(named) = &named
        && let Some(now) = moved_from(admin, named).await?
    {
        followed |= store.follow_now(named, &now, caller).await?;
    }
    if let (Some(other), Some(info)) = (renamed_to(store, service, info).await?, info) {
        followed |= store.follow_now(&other, &info.relation, caller).await?;
    }
    if followed { Ok(store.registration(service.reference()).await?) } else { Ok(named) }
}

/// An enabled registration that still has the old name of the table.
async fn renamed_to(store: &Store, service: &TableService, info: Option<&TableInfo>) -> Result<Option<Registration>> {
    let Some(info) = info else { return Ok(None) };
    let other = store.registration_by_oid(service.project().id, info.oid).await?;
    Ok(other.filter(|other| other.enabled && other.relation() != info.relation))
}

/// Where the table of an enabled registration is now, if that is elsewhere.
async fn moved_from(admin: &Admin, named: &Registration) -> Result<Option<Relation>> {
    if !named.enabled {
        return Ok(None);
    }
    Ok(admin.name_of(named.oid).await?.filter(|now| *now != named.relation()))
}
