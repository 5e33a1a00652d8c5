use std::collections::BTreeSet;

use aura_auth::Verifier;
use aura_domain::SqlName;
use aura_kit::Code;
use aura_pgsource::roles::{BUILT_IN, project_role};
use aura_store::{Project, ProjectChange, ProjectSettings};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::{
    access::{is_system, name},
    error::{ApiError, Result},
    routes::present,
};

/// Longest project name in characters.
const MAX_NAME: usize = 100;
/// Longest `aud` and `jwks_url`, in bytes.
const MAX_TEXT: usize = 2048;
/// Most role words, and most further schemas.
const MAX_WORDS: usize = 32;

/// What `limits` may override (R-FRT-2), each a whole number of 1 or more.
const LIMITS: [&str; 8] = [
    "sockets",
    "channels_per_socket",
    "bindings_per_channel",
    "joins_per_second",
    "events_per_second",
    "frame_bytes",
    "event_bytes",
    "queue_bytes",
];

/// A project's settings.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ProjectSettings)]
pub(crate) struct SettingsView {
    /// Overrides of the limits of its sockets, by name.
    limits: Map<String, Value>,
    /// Where the keys of end users' tokens are published; null = the project's secret only.
    jwks_url: Option<String>,
    /// `aud` that end users' tokens must have; null = any.
    aud: Option<String>,
    /// Role words that tokens may carry besides `anon`, `authenticated` and `service_role`.
    #[schema(example = json!(["editor"]))]
    roles: Vec<String>,
    /// Further physical schemas of the project.
    #[schema(value_type = Vec<String>, example = json!(["billing"]))]
    schemas: Vec<SqlName>,
    /// Tables without row security deliver nothing.
    require_rls: bool,
    /// Public channels are refused.
    private_only: bool,
}

impl From<ProjectSettings> for SettingsView {
    fn from(settings: ProjectSettings) -> Self {
        let ProjectSettings { limits, jwks_url, aud, roles, schemas, require_rls, private_only } = settings;
        Self { limits, jwks_url, aud, roles, schemas, require_rls, private_only }
    }
}

/// What changes of a project. What is absent stays, null brings the default back, a value replaces what was there.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"require_rls": true, "aud": "authenticated", "jwks_url": null}))]
pub(crate) struct PatchProject {
    /// Unique, 1 to 100 characters. It has no default: null is refused.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    name: Option<Option<String>>,
    /// `sockets`, `channels_per_socket`, `bindings_per_channel`, `joins_per_second`, `events_per_second`, `frame_bytes`,
    /// `event_bytes`, `queue_bytes`, each 1 or more; null = none is overridden.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Map<String, Value>>)]
    limits: Option<Option<Map<String, Value>>>,
    /// `https://…`; null = the project's secret only.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    jwks_url: Option<Option<String>>,
    /// Null = any.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    aud: Option<Option<String>>,
    /// At most 32 words of 1 to 24 of `a-z 0-9 _`; their roles are made in the source. Null = none.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Vec<String>>)]
    roles: Option<Option<Vec<String>>>,
    /// At most 32 physical schemas of the source that no other project has; null = none.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Vec<String>>)]
    schemas: Option<Option<Vec<String>>>,
    /// Null = false.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<bool>)]
    require_rls: Option<Option<bool>>,
    /// Null = false.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<bool>)]
    private_only: Option<Option<bool>>,
}

impl PatchProject {
    pub(crate) fn check(self, project: &Project, verifier: &Verifier) -> Result<ProjectChange> {
        let name = self.name.map(|name| name.ok_or_else(|| invalid("name has no default."))).transpose()?;
        name.as_deref().map(check_name).transpose()?;
        let limits = self.limits.map(Option::unwrap_or_default);
        limits.as_ref().map(check_limits).transpose()?;
        self.jwks_url.iter().flatten().try_for_each(|url| check_url(verifier, url))?;
        self.aud.iter().flatten().try_for_each(|aud| check_text(aud, "aud"))?;
        let roles = self.roles.map(Option::unwrap_or_default);
        roles.as_ref().map(|roles| check_roles(project, roles)).transpose()?;
        let schemas = self.schemas.map(|schemas| check_schemas(project, schemas.unwrap_or_default())).transpose()?;
        Ok(ProjectChange {
            name,
            limits,
            jwks_url: self.jwks_url,
            aud: self.aud,
            roles,
            schemas,
            require_rls: self.require_rls.map(Option::unwrap_or_default),
            private_only: self.private_only.map(Option::unwrap_or_default),
        })
    }
}

/// A project's name.
pub(crate) fn check_name(name: &str) -> Result<()> {
    if !(1..=MAX_NAME).contains(&name.chars().count()) || name.chars().any(char::is_control) {
        return Err(invalid(format!("name has 1 to {MAX_NAME} characters and no control characters.")));
    }
    Ok(())
}

/// A schema that may be a project's.
pub(crate) fn check_schema(schema: String) -> Result<SqlName> {
    let schema = name(schema, "schema")?;
    if is_system(&schema) {
        return Err(ApiError::new(Code::SystemSchemaNotSupported, "That schema belongs to the server or to us."));
    }
    Ok(schema)
}

fn check_limits(limits: &Map<String, Value>) -> Result<()> {
    for (name, value) in limits {
        if !LIMITS.contains(&name.as_str()) {
            return Err(invalid(format!("limits has no such member; it takes {}.", LIMITS.join(", "))));
        }
        if !value.as_u64().is_some_and(|number| (1..=i32::MAX as u64).contains(&number)) {
            return Err(invalid(format!("limits.{name} is a whole number of 1 to {}.", i32::MAX)));
        }
    }
    Ok(())
}

/// What the verifier wouldn't read: nobody should learn that from tokens that are refused.
fn check_url(verifier: &Verifier, url: &str) -> Result<()> {
    check_text(url, "jwks_url")?;
    verifier.check_jwks_url(url).map_err(|error| invalid(format!("jwks_url can't be used: {error}.")))
}

fn check_text(text: &str, member: &str) -> Result<()> {
    if !(1..=MAX_TEXT).contains(&text.len()) || text.chars().any(char::is_control) {
        return Err(invalid(format!("{member} has 1 to {MAX_TEXT} bytes and no control characters.")));
    }
    Ok(())
}

fn check_roles(project: &Project, roles: &[String]) -> Result<()> {
    let unique: BTreeSet<_> = roles.iter().collect();
    let legal = |role: &String| !BUILT_IN.contains(&role.as_str()) && project_role(project.id, role).is_some();
    if roles.len() > MAX_WORDS || unique.len() < roles.len() || !roles.iter().all(legal) {
        let detail = format!(
            "roles has at most {MAX_WORDS} different words of 1 to 24 of a-z 0-9 _, without {} and visibility.",
            BUILT_IN.join(", ")
        );
        return Err(invalid(detail));
    }
    Ok(())
}

fn check_schemas(project: &Project, schemas: Vec<String>) -> Result<Vec<SqlName>> {
    let schemas = schemas.into_iter().map(check_schema).collect::<Result<Vec<_>>>()?;
    let unique: BTreeSet<_> = schemas.iter().collect();
    // A client's `public` is the main schema, whatever that is called.
    let hidden = schemas.iter().any(|schema| schema.as_str() == "public" || *schema == project.schema);
    if schemas.len() > MAX_WORDS || unique.len() < schemas.len() || hidden {
        let detail = format!("schemas has at most {MAX_WORDS} different names, without public and the main schema.");
        return Err(invalid(detail));
    }
    Ok(schemas)
}

fn invalid(detail: impl Into<String>) -> ApiError {
    ApiError::new(Code::InvalidBody, detail)
}
