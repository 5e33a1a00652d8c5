use std::time::Duration;

use aura_domain::{EngineState, SourceId, Verb};
use aura_kit::{Code, Problem};
use aura_pgsource::{SourceError, SourceUrl, SqlState, connect_sql, publication::drop_publication, slot};
use aura_store::{Caller, Source, SourceChange, SourceWrite};
use serde::Serialize;
use utoipa::ToSchema;

use crate::{
    engine::{self, Stopped},
    error::{ApiError, Result},
    headers::{IfMatch, changed, version_etag},
    state::AppState,
};

/// Connecting, to take back what we made.
const CONNECT: Duration = Duration::from_secs(3);

/// What became of what a deleted source had in its server.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DeletedSource)]
pub(crate) struct Deleted {
    /// Id of the source that was.
    source: SourceId,
    /// Its slot.
    slot: Remains,
    /// Its publication.
    publication: Remains,
}

/// Something that we had in a customer's server.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Remains {
    /// Its name.
    #[schema(example = "aura_cdc_0191d0a0")]
    pub(crate) name: String,
    /// What became of it.
    pub(crate) fate: Fate,
}

aura_domain::words! {
    /// What became of something.
    Fate {
        /// It was ours and is gone.
        Dropped = "dropped",
        /// There was none.
        Missing = "missing",
        /// It isn't ours, or we may not: it is still there, and a slot keeps the server's log.
        Kept = "kept",
        /// The server could not be reached.
        Unknown = "unknown",
    }
}

/// Changes a source; what its engine reads by only while that is stopped.
pub(crate) async fn change(
    state: &AppState,
    source: &Source,
    change: SourceChange,
    if_match: &IfMatch,
    caller: Caller<'_>,
) -> Result<Source> {
    let based_on = |version| if_match.allows_version(version);
    done(state.store().update_source(source.id, change, based_on, caller).await?)
}

/// Deletes a source, after what we made in its server.
pub(crate) async fn delete(
    state: &AppState,
    source: &Source,
    force: bool,
    if_match: &IfMatch,
    caller: Caller<'_>,
) -> Result<Deleted> {
    if_match.check(&version_etag(source.version), true)?;
    // No engine is ended for a deletion that is refused.
    deletable(state, source, force, if_match).await?;
    if force {
        end(state, source, caller).await?;
        deletable(state, source, force, if_match).await?;
    }
    let slot = unless_unreachable(drop_slot(source).await, force)?;
    let publication = unless_unreachable(drop_own_publication(source).await, force)?;
    done(state.store().delete_source(source.id, force, caller).await?)?;
    Ok(Deleted {
        source: source.id,
        slot: Remains { name: source.slot_name.clone(), fate: slot },
        publication: Remains { name: slot::slot_name(source.id), fate: publication },
    })
}

/// Whether it may be deleted now.
async fn deletable(state: &AppState, source: &Source, force: bool, if_match: &IfMatch) -> Result<Source> {
    let based_on = |version| if_match.allows_version(version);
    done(state.store().source_deletable(source.id, force, based_on).await?)
}

/// What deleting it would do, in order.
pub(crate) async fn plan_deletion(
    state: &AppState,
    source: &Source,
    force: bool,
    if_match: &IfMatch,
) -> Result<Vec<String>> {
    let source = deletable(state, source, force, if_match).await?;
    let engine = state.store().engine(source.id).await?;
    let mut plan = Vec::new();
    if engine.is_some_and(|engine| engine.state != EngineState::Stopped) {
        plan.push("end its engine".to_owned());
    }
    if source.has_default_slot() {
        plan.push(format!("drop the replication slot {}, unless somebody uses it", source.slot_name));
    } else {
        plan.push(format!("leave the replication slot {} as it is", source.slot_name));
    }
    plan.push(format!("drop the publication {}, if there is one", slot::slot_name(source.id)));
    plan.push("forget the source, its engine and its gaps".to_owned());
    Ok(plan)
}

/// Ends its engine; a source that can't be reached is none that holds its deletion up.
async fn end(state: &AppState, source: &Source, caller: Caller<'_>) -> Result<()> {
    if let Stopped::Report(_) = engine::force_close(state, source, caller).await? {
        return Ok(());
    }
    let engine = state.store().engine(source.id).await?.ok_or_else(ApiError::source_not_found)?;
    if engine::is_unreachable(&engine) {
        return Ok(());
    }
    Err(engine::conflict("deleting the source", None, engine.state, None))
}

fn done(write: SourceWrite) -> Result<Source> {
    match write {
        SourceWrite::Done(source) => Ok(*source),
        SourceWrite::Changed => Err(changed()),
        SourceWrite::NotStopped(state) => Err(engine::conflict("that change", Some(Verb::Start), state, None)),
        SourceWrite::InUse(projects) => {
            Err(Problem::new(Code::SourceInUse, "Delete its projects first.").with("projects", projects).into())
        }
    }
}

fn unless_unreachable(outcome: std::result::Result<Fate, SourceError>, force: bool) -> Result<Fate> {
    match outcome {
        Err(error) if force && error.is_connection_error() => Ok(Fate::Unknown),
        outcome => Ok(outcome?),
    }
}

/// The slot, if it has the name that we give; a slot of another name was made by somebody who may still want it.
async fn drop_slot(source: &Source) -> std::result::Result<Fate, SourceError> {
    // Only from a session in the slot's own database, and as a login with REPLICATION.
    let url = SourceUrl::from_secret(&source.replication_url)?;
    let client = connect_sql(&url, "aura-admin", None, CONNECT).await?;
    match slot::status(&client, &source.slot_name).await? {
        None => Ok(Fate::Missing),
        Some(status) if !source.has_default_slot() || status.active || status.database != url.database() => {
            Ok(Fate::Kept)
        }
        Some(_) => Ok(if slot::drop_slot(&client, &source.slot_name).await? { Fate::Dropped } else { Fate::Missing }),
    }
}

/// The publication is ours by its name, which has the source's id.
async fn drop_own_publication(source: &Source) -> std::result::Result<Fate, SourceError> {
    let url = SourceUrl::from_secret(source.admin_url.as_ref().unwrap_or(&source.replication_url))?;
    let client = connect_sql(&url, "aura-admin", None, CONNECT).await?;
    match drop_publication(&client, &slot::slot_name(source.id)).await {
        Ok(true) => Ok(Fate::Dropped),
        Ok(false) => Ok(Fate::Missing),
        Err(error) if error.sqlstate() == Some(&SqlState::INSUFFICIENT_PRIVILEGE) => Ok(Fate::Kept),
        Err(error) => Err(error),
    }
}
