use aura_kit::request_id;
use aura_pgsource::admin::{Admin, TableInfo};
use aura_store::{NewAudit, NewRegistration, Registration, RegistrationStatus};
use tokio::time::Instant;

use super::{
    Options, RegistrationView, Unregistered, etag,
    partitions::{Former, full_sql, restore_sql, to_identity, to_partitions, to_restore},
    reconcile::{not_owner, set_identity},
    target,
    view::{drifted, view},
};
use crate::{access::TableService, error::Result, source::AdminLease, state::AppState};

/// What a PUT, GET or DELETE answers.
#[derive(Debug)]
pub(crate) struct Answer {
    /// The body.
    pub(crate) view: RegistrationView,
    /// `ETag`.
    pub(crate) etag: String,
    /// 200; else 202: the worker hasn't caught up yet.
    pub(crate) done: bool,
}

/// One change of one table.
pub(crate) struct Change<'a> {
    pub(crate) state: &'a AppState,
    pub(crate) service: &'a TableService,
    pub(crate) options: Options,
}

/// The table's state now.
pub(crate) async fn show(state: &AppState, service: &TableService) -> Result<Answer> {
    let admin = state.sources().admin(state.store(), service.project().source).await?;
    let info = target::find(&admin, service).await?;
    let registration = state.store().registration(service.reference()).await?;
    if info.is_none() && registration.is_none() {
        return Err(target::not_found(service));
    }
    admin.done();
    Ok(answer(service, registration.as_ref(), info.as_ref(), true))
}

impl Change<'_> {
    /// Turns it on or off, and waits for the worker.
    pub(crate) async fn run(&self, enabled: bool) -> Result<Answer> {
        let deadline = Instant::now() + self.options.wait;
        let service = self.service;
        let turn = self.state.locks().turn(service.project().id, service.schema(), service.table()).await?;
        turn.shared_failure()?;
        let outcome = turn.leave(self.write(enabled).await)?;
        match outcome {
            Written::Plan(answer) => Ok(answer),
            Written::On(registration, info) => self.await_active(registration, info, deadline).await,
            Written::Off(registration, info, restored) => {
                self.await_applied(registration, info, restored, deadline).await
            }
        }
    }

    /// The part that only one request at a time does.
    async fn write(&self, enabled: bool) -> Result<Written> {
        let admin = self.state.sources().admin(self.state.store(), self.service.project().source).await?;
        let known = self.state.store().registration(self.service.reference()).await?;
        self.options.if_match.check(&etag(known.as_ref()), known.is_some())?;
        let written = match (enabled, self.options.dry_run) {
            (true, false) => self.turn_on(&admin, known).await?,
            (false, false) => self.turn_off(&admin, known).await?,
            (true, true) => self.plan_on(&admin, known).await?,
            (false, true) => self.plan_off(&admin, known).await?,
        };
        admin.done();
        Ok(written)
    }

    /// Intent first, in a transaction of its own, then the ALTER (R-REG-3).
    async fn turn_on(&self, admin: &AdminLease, known: Option<Registration>) -> Result<Written> {
        let info = target::resolve(admin, self.service).await?;
        refuse_foreign_owner(&info)?;
        if !is_settled(known.as_ref(), &info) {
            self.state.rate().count(self.service.project().id)?;
        }
        let store = self.state.store();
        let (identity, request) = (to_identity(&info), request_id::current());
        let partitions = to_partitions(&info);
        let intent = NewRegistration {
            table: self.service.reference(),
            source: self.service.project().source,
            oid: info.oid,
            identity: Some(&identity),
            partitions: &partitions,
            actor: self.service.access().actor().as_str(),
            request_id: request.as_deref(),
        };
        let registration = store.enable_table(intent).await?;
        if registration.identity_set && !drifted(&registration, Some(&info)) {
            return Ok(Written::On(registration, Some(info)));
        }
        let repair = registration.identity_set;
        let registration = set_identity(store, admin, registration).await?;
        if repair {
            self.audit_repair(&registration).await?;
        }
        let info = target::find(admin, self.service).await?;
        Ok(Written::On(registration, info))
    }

    async fn audit_repair(&self, registration: &Registration) -> Result<()> {
        let request = request_id::current();
        let entry = NewAudit {
            project: Some(registration.project),
            actor: self.service.access().actor().as_str(),
            action: "table.repair",
            target: format!("{}.{}", registration.schema, registration.table),
            before: None,
            after: None,
            request_id: request.as_deref(),
        };
        Ok(self.state.store().audit(entry).await?)
    }

    async fn turn_off(&self, admin: &AdminLease, known: Option<Registration>) -> Result<Written> {
        let info = target::find(admin, self.service).await?;
        let Some(known) = known else {
            return if info.is_some() {
                Ok(Written::Off(None, info, true))
            } else {
                Err(target::not_found(self.service))
            };
        };
        let store = self.state.store();
        let actor = self.service.access().actor().as_str();
        let registration = if known.enabled {
            self.state.rate().count(known.project)?;
            let lsn = admin.current_wal_insert_lsn().await?;
            let request = request_id::current();
            store.disable_table(self.service.reference(), lsn, actor, request.as_deref()).await?
        } else {
            Some(known)
        };
        let restored = match &registration {
            Some(registration) => self.restore(admin, registration, info.as_ref()).await?,
            None => true,
        };
        let info = target::find(admin, self.service).await?;
        Ok(Written::Off(registration, info, restored))
    }

    /// Gives the table back the identity it had, if it still is what we set. A lock that isn't to be had doesn't undo
    /// the disabling: the next PUT tries again. `false` = not restored.
    async fn restore(&self, admin: &Admin, known: &Registration, info: Option<&TableInfo>) -> Result<bool> {
        if known.previous_identity.is_none() {
            return Ok(true);
        }
        for Former { relation, oid, identity } in to_restore(self.state, known, info).await? {
            let restored = admin.restore_replica_identity(&relation, oid, identity.kind, identity.index.as_ref());
            if let Err(error) = restored.await {
                tracing::warn!(%error, "replica identity not restored");
                return Ok(false);
            }
        }
        self.state.store().identity_restored(known.id).await?;
        Ok(true)
    }

    async fn plan_on(&self, admin: &AdminLease, known: Option<Registration>) -> Result<Written> {
        let info = target::resolve(admin, self.service).await?;
        refuse_foreign_owner(&info)?;
        let live = known.as_ref().is_some_and(|known| known.enabled && known.oid == info.oid);
        let mut plan = Vec::new();
        if !live {
            plan.push("register the table and signal the worker".to_owned());
        }
        if !info.is_full() {
            let waits = |sql: String| format!("{sql} (waits for its lock at most 3 s)");
            plan.extend(full_sql(&info).into_iter().map(waits));
        }
        Ok(Written::Plan(self.planned(known.as_ref(), Some(&info), plan)))
    }

    async fn plan_off(&self, admin: &AdminLease, known: Option<Registration>) -> Result<Written> {
        let info = target::find(admin, self.service).await?;
        if known.is_none() && info.is_none() {
            return Err(target::not_found(self.service));
        }
        let mut plan = Vec::new();
        if let Some(known) = known.as_ref().filter(|known| known.enabled) {
            plan.push("take the table out of the filter and signal the worker".to_owned());
            plan.extend(to_restore(self.state, known, info.as_ref()).await?.iter().map(restore_sql));
        }
        Ok(Written::Plan(self.planned(known.as_ref(), info.as_ref(), plan)))
    }

    fn planned(&self, known: Option<&Registration>, info: Option<&TableInfo>, plan: Vec<String>) -> Answer {
        let answer = answer(self.service, known, info, true);
        Answer { view: answer.view.with_plan(plan), ..answer }
    }

    /// Until the running filter covers the table.
    async fn await_active(
        &self,
        registration: Registration,
        info: Option<TableInfo>,
        deadline: Instant,
    ) -> Result<Answer> {
        let (store, id) = (self.state.store(), registration.id);
        let settled = |found: &Registration| match found.status {
            RegistrationStatus::Pending => false,
            RegistrationStatus::Active => found.identity_set,
            // Waiting longer won't help; the body says why.
            RegistrationStatus::Blocked | RegistrationStatus::Missing | RegistrationStatus::Disabled => true,
        };
        let probe = || async { Ok(store.registration_by_id(id).await?.filter(|found| settled(found))) };
        let found = self.state.progress().wait(deadline, probe).await?;
        let latest = match found {
            Some(found) => found,
            None => store.registration_by_id(id).await?.unwrap_or(registration),
        };
        let done = latest.enabled && latest.status == RegistrationStatus::Active && latest.identity_set;
        Ok(answer(self.service, Some(&latest), info.as_ref(), done))
    }

    /// Until the engine has applied the registration's revision (R-REG-8).
    async fn await_applied(
        &self,
        registration: Option<Registration>,
        info: Option<TableInfo>,
        restored: bool,
        deadline: Instant,
    ) -> Result<Answer> {
        let done = match &registration {
            None => true,
            Some(known) => {
                let (store, source, revision) = (self.state.store(), known.source, known.revision);
                let probe = || async {
                    let engine = store.engine(source).await?;
                    Ok(engine.filter(|engine| engine.applied_revision >= revision).map(|_| ()))
                };
                self.state.progress().wait(deadline, probe).await?.is_some()
            }
        };
        let answer = answer(self.service, registration.as_ref(), info.as_ref(), done);
        let message = "The table is locked: its replica identity is still FULL. PUT it again to restore it.";
        let view = if restored { answer.view } else { answer.view.with_warning("identity_not_restored", message) };
        Ok(Answer { view, ..answer })
    }
}

/// Whether a PUT of `enabled: true` has nothing to do.
fn is_settled(known: Option<&Registration>, info: &TableInfo) -> bool {
    known.is_some_and(|known| known.enabled && known.oid == info.oid && known.identity_set && info.is_full())
}

/// What [`Change::write`] did.
enum Written {
    Plan(Answer),
    On(Registration, Option<TableInfo>),
    /// With whether the identity is what it was.
    Off(Option<Registration>, Option<TableInfo>, bool),
}

fn answer(service: &TableService, known: Option<&Registration>, info: Option<&TableInfo>, done: bool) -> Answer {
    let bare = Unregistered { schema: service.schema(), table: service.table() };
    Answer { view: view(service.project(), known.ok_or(bare), info), etag: etag(known), done }
}

/// Only the owner may ALTER; what is FULL already needs none (R-REG-4).
fn refuse_foreign_owner(info: &TableInfo) -> Result<()> {
    if info.owned_by_us || info.is_full() { Ok(()) } else { Err(not_owner(info)) }
}
