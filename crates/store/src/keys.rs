//! Keys and secrets of projects: what is good now, and its replacement.

use std::time::Duration;

use aura_domain::{AccessRules, KeyRole, LiveKey, LiveSecret, ProjectId};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Value, json};
use sqlx::{FromRow, PgConnection};
use uuid::Uuid;

use crate::{
    Caller, Project, ProjectSecrets, Store, StoreError,
    audit::{self, NewAudit},
    bounded,
    decode::{rfc3339, word},
    projects::{aad, notify_projects, open_text, random_secret},
};

/// Everything that verifying a token of a project needs.
#[derive(Debug, Clone)]
pub struct ProjectAuth {
    /// The project.
    pub project: Project,
    /// What signs now.
    pub jwt_secret: SecretString,
    /// What is accepted; keys that aren't being replaced come first.
    pub rules: AccessRules,
}

/// A key as lists show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyRecord {
    /// `kid` of its token.
    pub id: Uuid,
    /// What it may do.
    pub role: KeyRole,
    /// RFC 3339, UTC.
    pub created_at: String,
    /// From when it is, or will be, refused; RFC 3339, UTC.
    pub valid_until: Option<String>,
    /// Whether it is accepted now.
    pub valid: bool,
}

/// What is to be replaced.
#[derive(Debug, Clone)]
pub struct KeyRotation {
    /// Keys of these roles; of all when the secret is replaced, since that signed them.
    pub roles: Vec<KeyRole>,
    /// The secret, too.
    pub secret: bool,
    /// How long the old ones stay good at most; zero = they are refused at once, those of earlier rotations as well.
    pub overlap: Duration,
}

/// What came of a rotation.
#[derive(Debug, Clone)]
pub struct RotatedKeys {
    /// What signs now.
    pub jwt_secret: SecretString,
    /// The new keys.
    pub keys: Vec<KeyRecord>,
    /// The keys that they replace, with the end of each.
    pub replaced: Vec<KeyRecord>,
}

#[derive(FromRow)]
struct AcceptedRow {
    id: Uuid,
    role: Option<String>,
    secret: Option<Vec<u8>>,
    until: Option<i64>,
}

#[derive(FromRow)]
struct RecordRow {
    id: Uuid,
    role: String,
    created_at: String,
    valid_until: Option<String>,
    valid: bool,
}

macro_rules! columns {
    () => {
        concat!(
            "id, role, ",
            rfc3339!("created_at"),
            " as created_at, ",
            rfc3339!("revoked_at"),
            " as valid_until, revoked_at is null or revoked_at > now() as valid"
        )
    };
}

impl RecordRow {
    fn record(self) -> Result<KeyRecord, StoreError> {
        let Self { id, role, created_at, valid_until, valid } = self;
        Ok(KeyRecord { id, role: word(&role, "key role")?, created_at, valid_until, valid })
    }
}

impl Store {
    /// What verifying a token of the project needs.
    pub async fn project_auth(&self, id: ProjectId) -> Result<Option<ProjectAuth>, StoreError> {
        let Some((project, secrets)) = self.project_with_secrets(id).await? else { return Ok(None) };
        let query = sqlx::query_as::<_, AcceptedRow>(
            "select id, role, null::bytea as secret, floor(extract(epoch from revoked_at))::bigint as until
             from aura.keys where project_id = $1 and (revoked_at is null or revoked_at > now())
             union all
             select id, null, jwt_secret, floor(extract(epoch from valid_until))::bigint
             from aura.retired_secrets where project_id = $1 and valid_until > now()
             order by until desc nulls first, id",
        );
        let rows = bounded(async { Ok(query.bind(id.0).fetch_all(&self.pool).await?) }).await?;
        let ProjectSecrets { jwt_secret, .. } = secrets;
        let mut rules = AccessRules {
            project: id,
            secrets: vec![LiveSecret { secret: jwt_secret.clone(), until: None }],
            keys: Vec::new(),
            audience: project.settings.aud.clone(),
            jwks_url: project.settings.jwks_url.clone(),
            roles: project.settings.roles.clone(),
        };
        for AcceptedRow { id: row, role, secret, until } in rows {
            match (role, secret) {
                (Some(role), _) => rules.keys.push(LiveKey { id: row, role: word(&role, "key role")?, until }),
                (None, Some(sealed)) => {
                    let secret = open_text(&self.key, &sealed, &aad(id, "jwt_secret"))?;
                    rules.secrets.push(LiveSecret { secret, until });
                }
                (None, None) => return Err(StoreError::Corrupt("key")),
            }
        }
        Ok(Some(ProjectAuth { project, jwt_secret, rules }))
    }

    /// A project's keys in the order of their ids, `limit` of them, above `after` (the cursor); refused ones as well.
    pub async fn keys_of_project(
        &self,
        project: ProjectId,
        after: Option<Uuid>,
        limit: u32,
    ) -> Result<Vec<KeyRecord>, StoreError> {
        let query = sqlx::query_as::<_, RecordRow>(concat!(
            "select ",
            columns!(),
            " from aura.keys where project_id = $1 and ($2::uuid is null or id > $2) order by id limit $3"
        ));
        let query = query.bind(project.0).bind(after).bind(i64::from(limit));
        let rows = bounded(async { Ok(query.fetch_all(&self.pool).await?) }).await?;
        rows.into_iter().map(RecordRow::record).collect()
    }

    /// Makes new keys, and gives the old ones an end. `NotFound` = project.
    pub async fn rotate_keys(
        &self,
        project: ProjectId,
        rotation: KeyRotation,
        caller: Caller<'_>,
    ) -> Result<RotatedKeys, StoreError> {
        bounded(async {
            let mut tx = self.pool.begin().await?;
            // One rotation after the other.
            let lock = "select jwt_secret from aura.projects where id = $1 and deleted_at is null for update";
            let sealed = sqlx::query_scalar::<_, Vec<u8>>(lock).bind(project.0).fetch_optional(&mut *tx).await?;
            let sealed = sealed.ok_or(StoreError::NotFound("project"))?;
            let jwt_secret = match rotation.secret {
                true => self.replace_secret(&mut tx, project, rotation.overlap).await?,
                false => open_text(&self.key, &sealed, &aad(project, "jwt_secret"))?,
            };
            let roles = if rotation.secret { KeyRole::ALL } else { &rotation.roles };
            let replaced = end_keys(&mut tx, project, roles, rotation.overlap).await?;
            let mut keys = Vec::new();
            for role in roles {
                keys.push(insert_key(&mut tx, project, *role).await?);
            }
            let rotated = RotatedKeys { jwt_secret, keys, replaced };
            audit::append(&mut tx, rotated.entry(project, rotation.secret, caller)).await?;
            notify_projects(&mut tx, project).await?;
            tx.commit().await?;
            Ok(rotated)
        })
        .await
    }

    async fn replace_secret(
        &self,
        connection: &mut PgConnection,
        project: ProjectId,
        overlap: Duration,
    ) -> Result<SecretString, StoreError> {
        let seconds = overlap.as_secs_f64();
        for sql in [
            "insert into aura.retired_secrets (id, project_id, jwt_secret, valid_until)
             select gen_random_uuid(), id, jwt_secret, now() + make_interval(secs => $2) from aura.projects where id = $1",
            "update aura.retired_secrets set valid_until = least(valid_until, now() + make_interval(secs => $2))
             where project_id = $1",
        ] {
            sqlx::query(sql).bind(project.0).bind(seconds).execute(&mut *connection).await?;
        }
        // What is refused needn't be kept.
        let over = sqlx::query("delete from aura.retired_secrets where project_id = $1 and valid_until <= now()");
        over.bind(project.0).execute(&mut *connection).await?;
        let secret = random_secret();
        let sealed = self.key.seal(secret.expose_secret().as_bytes(), &aad(project, "jwt_secret"));
        let query = sqlx::query("update aura.projects set jwt_secret = $2 where id = $1");
        query.bind(project.0).bind(sealed).execute(connection).await?;
        Ok(secret)
    }
}

async fn end_keys(
    connection: &mut PgConnection,
    project: ProjectId,
    roles: &[KeyRole],
    overlap: Duration,
) -> Result<Vec<KeyRecord>, StoreError> {
    let query = sqlx::query_as::<_, RecordRow>(concat!(
        "update aura.keys set revoked_at = least(revoked_at, now() + make_interval(secs => $3))
         where project_id = $1 and role = any ($2) and (revoked_at is null or revoked_at > now()) returning ",
        columns!()
    ));
    let roles: Vec<_> = roles.iter().map(|role| role.as_str()).collect();
    let rows = query.bind(project.0).bind(roles).bind(overlap.as_secs_f64()).fetch_all(connection).await?;
    rows.into_iter().map(RecordRow::record).collect()
}

pub(crate) async fn insert_key(
    connection: &mut PgConnection,
    project: ProjectId,
    role: KeyRole,
) -> Result<KeyRecord, StoreError> {
    let query = sqlx::query_as::<_, RecordRow>(concat!(
        "insert into aura.keys (id, project_id, role) values ($1, $2, $3) returning ",
        columns!()
    ));
    let query = query.bind(Uuid::new_v4()).bind(project.0).bind(role.as_str());
    query.fetch_one(connection).await?.record()
}

impl RotatedKeys {
    fn entry<'a>(&self, project: ProjectId, secret: bool, caller: Caller<'a>) -> NewAudit<'a> {
        let list = |keys: &[KeyRecord]| -> Vec<Value> {
            let one = |key: &KeyRecord| json!({"id": key.id, "role": key.role, "valid_until": key.valid_until});
            keys.iter().map(one).collect()
        };
        let before = json!({"keys": self.replaced.iter().map(|key| key.id).collect::<Vec<_>>()});
        let after = json!({"keys": list(&self.keys), "replaced": list(&self.replaced), "new_jwt_secret": secret});
        caller.project_entry(project, "keys.rotate", project, Some(before), Some(after))
    }
}
