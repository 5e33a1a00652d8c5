use aura_kit::{Code, request_id};
use aura_pgsource::admin::TableInfo;
use aura_store::{NewAudit, NewRegistration, Registration, RegistrationMode, RegistrationStatus};
use tokio::time::Instant;

use super::{
    Options, RegistrationView, Unregistered, etag, identity,
    partitions::{to_identity, to_partitions},
    plan,
    standing::{self, Standing},
    target,
    view::{drifted, view},
};
use crate::{
    access::TableService,
    engine::lag_now,
    error::{ApiError, Result},
    source::AdminLease,
    state::AppState,
};

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

/// What a table's state is to be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Desired {
    /// On; without a mode in the one that it has, `auto` at first.
    On(Option<RegistrationMode>),
    Off,
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
    let standing = standing::look(state.store(), &admin, service, info.as_ref()).await?;
    if info.is_none() && standing.known.is_none() {
        return Err(target::not_found(service));
    }
    admin.done();
    let lag = state.store().engine(service.project().source).await?.as_ref().and_then(lag_now);
    let answer = answer_noted(service, &standing, info.as_ref());
    Ok(Answer { view: answer.view.with_lag(lag), ..answer })
}

impl Change<'_> {
    /// Turns it on or off, and waits for the worker.
    pub(crate) async fn run(&self, desired: Desired) -> Result<Answer> {
        let deadline = Instant::now() + self.options.wait;
        let service = self.service;
        let turn = self.state.locks().turn(service.project().id, service.schema(), service.table()).await?;
        turn.shared_failure()?;
        let outcome = turn.leave(self.write(desired).await)?;
        match outcome {
            Written::Plan(answer) => Ok(answer),
            Written::On(registration, info) => self.await_active(registration, info, deadline).await,
            Written::Off(registration, info, restored) => {
                self.await_applied(registration, info, restored, deadline).await
            }
        }
    }

    /// The part that only one request at a time does.
    async fn write(&self, desired: Desired) -> Result<Written> {
        let admin = self.state.sources().admin(self.state.store(), self.service.project().source).await?;
        let info = target::find(&admin, self.service).await?;
        let standing = standing::look(self.state.store(), &admin, self.service, info.as_ref()).await?;
        let known = standing.known.as_ref();
        self.options.if_match.check(&etag(known), known.is_some())?;
        let written = match (desired, self.options.dry_run) {
            (Desired::On(mode), false) => self.turn_on(&admin, info, mode).await?,
            (Desired::Off, false) => self.turn_off(&admin, info).await?,
            (Desired::On(mode), true) => self.plan_on(&standing, info, mode)?,
            (Desired::Off, true) => self.plan_off(&standing, info.as_ref()).await?,
        };
        admin.done();
        Ok(written)
    }

    /// Intent first, in a transaction of its own, then the ALTER (R-REG-3).
    async fn turn_on(
        &self,
        admin: &AdminLease,
        info: Option<TableInfo>,
        mode: Option<RegistrationMode>,
    ) -> Result<Written> {
        let info = target::checked(info, self.service)?;
        let store = self.state.store();
        let known = standing::settle(store, admin, self.service, Some(&info)).await?;
        let mode = wanted_mode(mode, known.as_ref());
        self.refuse(&info, mode)?;
        if !is_settled(known.as_ref(), &info, mode) {
            self.state.rate().count(self.service.project().id)?;
        }
        let (before, partitions) = (to_identity(&info), to_partitions(&info));
        let request = request_id::current();
        let intent = NewRegistration {
            table: self.service.reference(),
            source: self.service.project().source,
            oid: info.oid,
            mode,
            identity: (mode == RegistrationMode::Auto).then_some(&before),
            partitions: &partitions,
            actor: self.service.access().actor().as_str(),
            request_id: request.as_deref(),
        };
        let registration = store.enable_table(intent).await?;
        if registration.identity_set && !drifted(&registration, Some(&info)) {
            return Ok(Written::On(registration, Some(info)));
        }
        let repair = registration.identity_set;
        let registration = identity::set_or_say(store, admin, &registration).await?;
        let now = target::find(admin, self.service).await?;
        if repair {
            self.audit_repair(&registration, &info, now.as_ref()).await?;
        }
        Ok(Written::On(registration, now))
    }

    async fn audit_repair(
        &self,
        registration: &Registration,
        before: &TableInfo,
        after: Option<&TableInfo>,
    ) -> Result<()> {
        let request = request_id::current();
        let entry = NewAudit {
            project: Some(registration.project),
            actor: self.service.access().actor().as_str(),
            action: "table.repair",
            target: format!("{}.{}", registration.schema, registration.table),
            before: Some(serde_json::json!({"replica_identity": to_identity(before)})),
            after: after.map(|info| serde_json::json!({"replica_identity": to_identity(info)})),
            request_id: request.as_deref(),
        };
        Ok(self.state.store().audit(entry).await?)
    }

    async fn turn_off(&self, admin: &AdminLease, info: Option<TableInfo>) -> Result<Written> {
        let store = self.state.store();
        let Some(known) = standing::settle(store, admin, self.service, info.as_ref()).await? else {
            return if info.is_some() {
                Ok(Written::Off(None, info, true))
            } else {
                Err(target::not_found(self.service))
            };
        };
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
            Some(off) => identity::restore(store, admin, off, false).await?,
            None => true,
        };
        let info = target::find(admin, self.service).await?;
        Ok(Written::Off(registration, info, restored))
    }

    fn plan_on(&self, standing: &Standing, info: Option<TableInfo>, mode: Option<RegistrationMode>) -> Result<Written> {
        let info = target::checked(info, self.service)?;
        let mode = wanted_mode(mode, standing.known.as_ref());
        self.refuse(&info, mode)?;
        Ok(self.planned(standing, Some(&info), plan::on(standing.known.as_ref(), &info, mode)))
    }

    async fn plan_off(&self, standing: &Standing, info: Option<&TableInfo>) -> Result<Written> {
        if standing.known.is_none() && info.is_none() {
            return Err(target::not_found(self.service));
        }
        Ok(self.planned(standing, info, plan::off(self.state.store(), standing.known.as_ref(), info).await?))
    }

    fn planned(&self, standing: &Standing, info: Option<&TableInfo>, plan: Vec<String>) -> Written {
        let answer = answer_noted(self.service, standing, info);
        Written::Plan(Answer { view: answer.view.with_plan(plan), ..answer })
    }

    /// Where a table can't be altered, or mustn't be, its owner is told what to run (R-REG-4).
    fn refuse(&self, info: &TableInfo, mode: RegistrationMode) -> Result<()> {
        if self.service.project().settings.require_rls && !info.rls_enabled {
            let detail = "Turn its row security on first: the project's setting require_rls asks for it.";
            return Err(ApiError::new(Code::RowSecurityRequired, detail));
        }
        match mode {
            RegistrationMode::Auto => identity::refuse_foreign_owner(info),
            RegistrationMode::Manual => identity::refuse_unset(info),
        }
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
        let message = "The table is locked: its replica identity is still FULL. It is restored when the lock is gone.";
        let view = if restored { answer.view } else { answer.view.with_warning("identity_not_restored", message) };
        Ok(Answer { view, ..answer })
    }
}

/// Who says nothing about the mode leaves it as it is.
fn wanted_mode(asked: Option<RegistrationMode>, known: Option<&Registration>) -> RegistrationMode {
    let current = known.filter(|known| known.enabled).map(|known| known.mode);
    asked.or(current).unwrap_or(RegistrationMode::Auto)
}

/// Whether a PUT of `enabled: true` has nothing to do.
fn is_settled(known: Option<&Registration>, info: &TableInfo, mode: RegistrationMode) -> bool {
    let same = |known: &Registration| (known.oid, known.mode) == (info.oid, mode);
    known.is_some_and(|known| known.enabled && same(known) && known.identity_set && info.is_full())
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

fn answer_noted(service: &TableService, standing: &Standing, info: Option<&TableInfo>) -> Answer {
    let answer = answer(service, standing.known.as_ref(), info, true);
    Answer { view: answer.view.with_note(standing.note.as_deref()), ..answer }
}
