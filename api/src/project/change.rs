use aura_domain::SqlName;
use aura_kit::{Code, Problem};
use aura_store::{Caller, Project, ProjectChange, ProjectWrite};

use crate::{
    error::{ApiError, Result},
    headers::{IfMatch, changed},
    state::AppState,
};

/// Changes a project: first in its source, where roles and schemas are concerned, then in the platform database.
pub(crate) async fn change(
    state: &AppState,
    project: &Project,
    change: ProjectChange,
    if_match: &IfMatch,
    caller: Caller<'_>,
) -> Result<Project> {
    let after = preview(state, project, change.clone(), if_match).await?;
    prepare(state, project, &after).await?;
    done(state.store().update_project(project.id, change, |version| if_match.allows_version(version), caller).await?)
}

/// The project as the change would leave it; nothing is changed.
pub(crate) async fn preview(
    state: &AppState,
    project: &Project,
    change: ProjectChange,
    if_match: &IfMatch,
) -> Result<Project> {
    done(state.store().preview_project(project.id, change, |version| if_match.allows_version(version)).await?)
}

pub(super) fn done(write: ProjectWrite) -> Result<Project> {
    match write {
        ProjectWrite::Done(project) => Ok(*project),
        ProjectWrite::Changed => Err(changed()),
        ProjectWrite::TablesOn(tables) => {
            let detail = "Turn its tables off before you take the schema from the project.";
            Err(Problem::new(Code::SchemaInUse, detail).with("tables", tables).into())
        }
    }
}

/// Its roles, and their way into its schemas. Who gives a schema up is kept out of it before anybody else can have it.
async fn prepare(state: &AppState, before: &Project, after: &Project) -> Result<()> {
    let (from, to) = (&before.settings, &after.settings);
    if from.roles == to.roles && from.schemas == to.schemas {
        return Ok(());
    }
    let gone: Vec<SqlName> = from.schemas.iter().filter(|schema| !to.schemas.contains(schema)).cloned().collect();
    let secrets = state.store().project_with_secrets(before.id).await?.ok_or_else(ApiError::project_not_found)?.1;
    let admin = state.sources().admin(state.store(), before.source).await?;
    let missing = admin.missing_schemas(&to.schemas).await?;
    if !missing.is_empty() {
        let detail = "The source has no such schema; make it first.";
        return Err(ApiError::new(Code::InvalidBody, format!("schemas: {detail}")));
    }
    admin.provision_project(before.id, &before.schema, &to.roles, &secrets.visibility_password).await?;
    admin.open_schemas(before.id, &to.schemas).await?;
    admin.close_schemas(before.id, &gone).await?;
    admin.done();
    Ok(())
}
