//! The end of a project: in the platform database first, so that from then on nobody has access; then what was made for it in
//! its source is taken back, by the request if it can and else by the reconciler.

use std::{collections::HashMap, time::Duration};

use aura_domain::ProjectId;
use aura_kit::{Code, Problem};
use aura_pgsource::admin::Admin;
use aura_store::{Caller, DeletedProject, Project, Registration, RegistrationFilter};
use serde::Serialize;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;

use super::change::done;
use crate::{
    error::Result,
    headers::{IfMatch, version_etag},
    source::{Fate, Remains},
    state::AppState,
    toggle::{Former, problem, to_restore},
};

/// How often the reconciler looks for what is left.
const PERIOD: Duration = Duration::from_secs(10);
/// Longest pause between two tries on one project.
const MAX_BACKOFF: Duration = Duration::from_secs(300);
/// Longest wait for the engine to let go of the project, before its roles are dropped under it.
const LET_GO: Duration = Duration::from_secs(3);

/// How to delete.
#[derive(Debug, Clone, Default)]
pub(crate) struct Deletion {
    /// Its main schema with everything in it, too.
    pub(crate) drop_schema: bool,
    pub(crate) if_match: IfMatch,
    /// How long the client waits.
    pub(crate) wait: Duration,
}

/// What became of a deleted project.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DeletedProject)]
pub(crate) struct DeletedView {
    /// Id of the project that was.
    #[schema(value_type = uuid::Uuid)]
    project: ProjectId,
    /// Its main schema.
    schema: Remains,
    /// Tables whose replica identity was given back.
    tables_restored: usize,
    /// Roles that something of its owner's still depends on. Nobody can log in with them.
    #[schema(example = json!([]))]
    roles_left: Vec<String>,
    /// Code of what stands in the way of the rest, which is tried again until it is done; null when it is.
    #[schema(value_type = Option<String>, example = "source_unreachable")]
    pending: Option<Code>,
}

impl DeletedView {
    pub(crate) fn is_done(&self) -> bool {
        self.pending.is_none()
    }
}

/// Deletes a project.
pub(crate) async fn delete(
    state: &AppState,
    project: &Project,
    deletion: &Deletion,
    caller: Caller<'_>,
) -> Result<DeletedView> {
    if deletion.drop_schema {
        droppable(state, project).await?;
    }
    let based_on = |version| deletion.if_match.allows_version(version);
    let project = done(state.store().delete_project(project.id, deletion.drop_schema, based_on, caller).await?)?;
    finish(state, &project, deletion.wait).await
}

/// What deleting it would do, in order.
pub(crate) async fn plan_deletion(state: &AppState, project: &Project, deletion: &Deletion) -> Result<Vec<String>> {
    deletion.if_match.check(&version_etag(project.version), true)?;
    let on = RegistrationFilter { enabled: Some(true), limit: u32::MAX, ..Default::default() };
    let on = state.store().registrations_of_project(project.id, on).await?;
    let mut plan = vec!["refuse its keys and close its sockets".to_owned()];
    plan.extend(
        on.iter().map(|table| format!("turn {}.{} off, and restore its replica identity", table.schema, table.table)),
    );
    if deletion.drop_schema {
        droppable(state, project).await?;
        plan.push(format!("drop the schema {} and everything in it", project.schema));
    } else {
        plan.push(format!("leave the schema {} as it is", project.schema));
    }
    plan.push("drop its roles and its login".to_owned());
    Ok(plan)
}

/// Only an owner drops a schema: else the deletion would never come to its end.
async fn droppable(state: &AppState, project: &Project) -> Result<()> {
    let admin = state.sources().admin(state.store(), project.source).await?;
    let ours = admin.owns_schema(&project.schema).await?;
    admin.done();
    if ours {
        return Ok(());
    }
    let detail = "The admin role doesn't own the schema. Let its owner run `sql`, or delete without drop_schema.";
    let sql = format!("ALTER SCHEMA {} OWNER TO <the admin role>;", project.schema.quoted());
    Err(Problem::new(Code::SourcePrivilegeMissing, detail).with("sql", sql).into())
}

/// Takes back what is left of a deleted project, as far as that is possible now.
pub(crate) async fn finish(state: &AppState, project: &Project, wait: Duration) -> Result<DeletedView> {
    let mut view = DeletedView {
        project: project.id,
        schema: Remains { name: project.schema.to_string(), fate: Fate::Kept },
        tables_restored: 0,
        roles_left: vec![],
        pending: None,
    };
    let Some(deleted) = state.store().deleted_project(project.id).await? else { return Ok(view) };
    let deadline = Instant::now() + wait;
    let_go(state, &deleted, wait.min(LET_GO)).await?;
    let outcome = timeout_at(deadline, Box::pin(take_back(state, &deleted, &mut view))).await;
    // Who doesn't wait so long leaves the rest to the reconciler.
    view.pending = outcome.map_or(Some(Code::SourceSlow), |outcome| outcome.err().map(|error| error.code()));
    if let Some(code) = view.pending {
        tracing::warn!(%code, project = %project.id, "a deleted project isn't gone from its source yet");
    }
    Ok(view)
}

/// Until the engine has dropped the project, if there is one that does within the time.
async fn let_go(state: &AppState, deleted: &DeletedProject, wait: Duration) -> Result<()> {
    let (store, source) = (state.store(), deleted.project.source);
    let probe = || async {
        let engine = store.engine(source).await?;
        let over = |engine: &aura_store::Engine| engine.applied_revision >= deleted.revision || engine.holder.is_none();
        Ok(engine.filter(over).map(drop))
    };
    state.progress().wait(Instant::now() + wait, probe).await.map(drop)
}

async fn take_back(state: &AppState, deleted: &DeletedProject, view: &mut DeletedView) -> Result<()> {
    let project = &deleted.project;
    let admin = state.sources().admin(state.store(), project.source).await?;
    let mut locked = None;
    for table in deleted.tables.iter().filter(|table| !deleted.drop_schema || table.schema != project.schema) {
        match restore(state, &admin, table).await {
            Ok(restored) => view.tables_restored += usize::from(restored),
            // One that is locked holds up nothing else.
            Err(error) => locked = Some(error),
        }
    }
    if deleted.drop_schema {
        admin.drop_schema(&project.schema).await?;
        view.schema.fate = Fate::Dropped;
    }
    view.roles_left = admin.deprovision_project(project.id).await?.roles;
    admin.done();
    match locked {
        Some(error) => Err(error),
        None => Ok(state.store().project_cleaned(project.id).await?),
    }
}

/// Gives a table its identity back, if it still is what we set. `false` = there was nothing to do.
async fn restore(state: &AppState, admin: &Admin, table: &Registration) -> Result<bool> {
    let _turn = state.locks().turn(table.project, &table.schema, &table.table).await?;
    let info = admin.table(&table.schema, &table.table).await?;
    let formers = to_restore(state.store(), table, info.as_ref()).await?;
    for Former { relation, oid, identity } in &formers {
        let restored = admin.restore_replica_identity(relation, *oid, identity.kind, identity.index.as_ref());
        if let Err(error) = restored.await {
            return Err(problem(admin, relation, error).await?);
        }
    }
    state.store().identity_restored(table.id).await?;
    Ok(!formers.is_empty())
}

/// Runs until `stop`: every 10 s it takes back what is left of deleted projects, with a pause per project that doubles from
/// 10 s to 5 min.
pub(crate) async fn reconcile(state: &AppState, stop: &CancellationToken) {
    let mut pauses: HashMap<ProjectId, (Instant, Duration)> = HashMap::new();
    while stop.run_until_cancelled(tokio::time::sleep(PERIOD)).await.is_some() {
        if let Some(Err(error)) = stop.run_until_cancelled(Box::pin(round(state, &mut pauses))).await {
            tracing::warn!(code = %error.code(), "deleted projects");
        }
    }
}

async fn round(state: &AppState, pauses: &mut HashMap<ProjectId, (Instant, Duration)>) -> Result<()> {
    let left = state.store().deleted_projects().await?;
    pauses.retain(|id, _| left.iter().any(|deleted| deleted.project.id == *id));
    for DeletedProject { project, .. } in left {
        if pauses.get(&project.id).is_some_and(|(at, _)| Instant::now() < *at) {
            continue;
        }
        if !finish(state, &project, MAX_BACKOFF).await?.is_done() {
            let pause = pauses.get(&project.id).map_or(PERIOD, |(_, pause)| (*pause * 2).min(MAX_BACKOFF));
            pauses.insert(project.id, (Instant::now() + pause, pause));
        }
    }
    Ok(())
}
