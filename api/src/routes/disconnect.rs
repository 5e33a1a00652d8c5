use std::time::Duration;

use aura_bus::{Disconnect, Message, Subject};
use aura_domain::Target;
use aura_kit::{Code, Json, Problem};
use aura_store::NewAudit;
use axum::{extract::State, http::StatusCode};
use serde::Deserialize;
use serde_json::json;
use tokio::time::timeout;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::{
    access::ProjectAdmin,
    error::{ApiError, Result},
    state::AppState,
};

/// Longest wait for the bus to take the order; fronts have the rest of the 2 s (R-FRT-3).
const SEND_LIMIT: Duration = Duration::from_secs(1);
/// Longest subject in bytes: no token could hold a longer one.
const MAX_SUBJECT: usize = 4096;

/// Who is disconnected: exactly one of the two.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = DisconnectRequest, example = json!({"subject": "a11ce000-0000-4000-8000-000000000001"}))]
pub(crate) struct DisconnectBody {
    /// `sub` of end users' tokens.
    subject: Option<String>,
    /// Id of an API key.
    key_id: Option<Uuid>,
}

/// Close the sockets and streams of a user or an API key.
///
/// On every front, within 2 s. It is no ban: whoever has a token that is good may connect again. To keep somebody out, let
/// their token expire or replace the key first.
#[utoipa::path(
    post,
    path = "/v1/projects/{project}/disconnect",
    operation_id = "disconnect",
    tag = "projects",
    extensions(("x-codes" = json!([Code::BusUnavailable]))),
    params(("project" = uuid::Uuid, Path, description = "Project id")),
    request_body = DisconnectBody,
    security(("apikey" = []), ("bearer" = [])),
    responses(
        (status = 204, description = "The order has gone out to every front")
    )
)]
pub(crate) async fn disconnect(
    access: ProjectAdmin,
    State(state): State<AppState>,
    Json(body): Json<DisconnectBody>,
) -> Result<StatusCode> {
    let project = access.project().id;
    let target = body.check()?;
    let order = Disconnect { project, target };
    send(&state, &order).await?;
    let request_id = aura_kit::request_id::current();
    let entry = NewAudit {
        project: Some(project),
        actor: access.actor().as_str(),
        action: "project.disconnect",
        target: project.to_string(),
        before: None,
        after: Some(json!(order.target)),
        request_id: request_id.as_deref(),
    };
    state.store().audit(entry).await?;
    Ok(StatusCode::NO_CONTENT)
}

impl DisconnectBody {
    fn check(self) -> Result<Target> {
        match (self.subject, self.key_id) {
            // No token's claims have a NUL, and the audit can't.
            (Some(subject), None) if (1..=MAX_SUBJECT).contains(&subject.len()) && !subject.contains('\0') => {
                Ok(Target::Subject(subject))
            }
            (None, Some(key)) => Ok(Target::KeyId(key)),
            _ => Err(ApiError::new(Code::InvalidBody, "Name a subject of 1 to 4096 bytes or a key_id, not both.")),
        }
    }
}

async fn send(state: &AppState, order: &Disconnect) -> Result<()> {
    let away = || Problem::new(Code::BusUnavailable, "Nobody was disconnected.").retry_after(1);
    let bus = state.bus().ok_or_else(away)?;
    let payload = serde_json::to_vec(order).map_err(|error| Problem::internal(&error))?;
    let message = Message::new(Subject::disconnect(order.project), payload);
    // As a batch, of which the bus confirms that it has it.
    match timeout(SEND_LIMIT, bus.publish_batch(&[message])).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => {
            tracing::warn!(%error, "can't disconnect anybody");
            Err(away().into())
        }
        Err(_) => Err(away().into()),
    }
}
