//! Who may see a row: row-level security judged on the images of the log (R-RLS-1 to -10).
//!
//! A check is one transaction per (table, batch). Where row security is off it is the catalogue statement alone, on the
//! worker's own login. Where it is on, it runs on a connection whose session_user is the project's visibility login, since
//! policies are code of the tenant and may run `RESET ROLE`.

use std::{sync::Arc, time::Duration};

use aura_domain::{Claims, Image, ProjectId, Relation};
use futures_util::future::try_join_all;
use secrecy::SecretString;
use tokio::time::Instant;
use tokio_postgres::error::SqlState;

use crate::{
    Sockets, SourceError, SourceUrl,
    catalog::{RoleAccess, TableCatalog},
    roles,
};

mod asked;
mod compile;
mod conditions;
mod explain;
mod facts;
mod flight;
mod judge;
mod own;
mod places;
mod plan;
mod probe;
mod readers;
mod sessions;
mod snapshot;
mod standing;
mod statement;

pub use compile::{CompileError, Subscriber};
pub use conditions::Tenant;
pub use explain::{PolicyQuestion, PolicyVerdict, PolicyWord};

use judge::{Judge, Pass};
use own::{Known, OwnLogin};
use plan::{Identities, Plan};
use sessions::Sessions;
use snapshot::Snapshot;
use standing::Standing;

/// How long a batch waits for its transactions to become visible; then the caller tries again.
const VISIBLE_LIMIT: Duration = Duration::from_secs(10);
/// Waiting times between two looks.
const FIRST_WAIT: Duration = Duration::from_micros(200);
const LONGEST_WAIT: Duration = Duration::from_millis(50);
/// The same where somebody has locked the table: each look keeps the connection that all tables share.
const LOCKED_WAIT: Duration = Duration::from_millis(500);

/// All visibility checks of one source.
pub struct VisibilityPool {
    own: OwnLogin,
    /// Shared with the probes that nobody waits for.
    sessions: Arc<Sessions>,
    conditions: Arc<conditions::Memory>,
    identities: Arc<Identities>,
    /// Database roles whose policies can't be asked for many at once, though they could be written so.
    forms: Standing<String, ()>,
    readers: readers::Readers,
}

/// Whose eyes a row is seen with. Two are the same if both parts are.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Identity {
    /// Role word of the token: `anon`, `authenticated`, `service_role`, a project's extra role.
    pub role: String,
    /// Claims as policies see them.
    pub claims: Claims,
}

/// What is to be judged: images of one table, all from transactions that have committed.
#[derive(Debug, Clone, Copy)]
pub struct CheckRequest<'a> {
    /// Tenant.
    pub project: ProjectId,
    /// Password of the project's visibility login.
    pub password: &'a SecretString,
    /// The table that was registered, by its physical names: a partitioned table's root, not the leaf (R-RLS-2).
    pub relation: &'a Relation,
    /// `pg_class.oid` when it was registered.
    pub registered_oid: u32,
    /// The transactions that the images come from.
    pub xids: &'a [u32],
    /// New and old images, in the caller's order.
    pub images: &'a [&'a Image],
    /// Each distinct identity once.
    pub identities: &'a [Identity],
    /// Per identity the indexes of the images that matter to it; `None`: all. What isn't wanted may come out as not visible.
    pub wanted: Option<&'a [Vec<usize>]>,
    /// The project's role words besides the built-in three.
    pub extra_roles: &'a [String],
}

/// What a check found.
#[derive(Debug)]
pub struct CheckOutcome {
    /// The table as it stands now under the name; `None`: nothing does.
    pub table: Option<Arc<TableCatalog>>,
    /// Whether it is the registered table. If not, nobody sees anything (R-RLS-10).
    pub oid_matches: bool,
    /// Whether row security is on. If not, the claim-less twins apply.
    pub row_security: bool,
    /// One per identity.
    pub verdicts: Vec<Verdict>,
    /// (identity, image) pairs that were denied since the image lacks a column that a policy reads (R-RLS-4).
    pub unjudgeable: usize,
    /// Statements for many identities that failed, so that these had to be asked in a way that costs more.
    pub failed_statements: usize,
}

/// One identity's verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Judged.
    Decided {
        /// Which columns the role may read.
        access: Arc<RoleAccess>,
        /// One per image.
        visible: Vec<bool>,
    },
    /// Not judged: sees nothing, and is to be told (one gap message).
    Error(IdentityErrorKind),
}

/// Why an identity could not be judged. The others of its batch are not affected (R-RLS-6).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum IdentityErrorKind {
    /// The role word is not in the project's allow-list, or its database role doesn't exist (R-RLS-8).
    UnknownRole,
    /// What stands under the name isn't the registered table.
    TableReplaced,
    /// A policy can't be judged on images: it reads a system column, or writes (R-RLS-4).
    NotJudgeable,
    /// A policy raised this error.
    Policy(SqlState),
    /// The check took longer than 2 s.
    TimedOut,
    /// Not asked: its checks, or those of others of its role, timed out a moment ago.
    CircuitOpen,
    /// The connection was lost in each of three tries.
    ConnectionLost,
    /// The project's visibility login can't connect, though our own can.
    LoginFailed,
}

impl VisibilityPool {
    /// No connection is opened yet. `source` is the worker's own login; it never runs what a tenant wrote.
    /// `application_name` is that of its connection; `max_connections` bounds those of visibility logins (16 by default,
    /// R-RLS-9), which show nothing of us.
    pub fn new(source: SourceUrl, sockets: Sockets, application_name: String, max_connections: usize) -> Self {
        let sessions = Sessions::new(source.clone(), sockets.clone(), max_connections);
        Self {
            own: OwnLogin::new(source, sockets, application_name),
            sessions: Arc::new(sessions),
            identities: Arc::default(),
            forms: Standing::default(),
            readers: readers::Readers::default(),
            conditions: Arc::default(),
        }
    }

    /// Judges the images for each identity. Waits, at most 10 s, until the batch's transactions are visible.
    ///
    /// Errors are the source's: whatever goes wrong in an identity's policy is its [`Verdict::Error`]. Cancel-safe: a
    /// connection that was in use is closed.
    pub async fn check(&self, request: CheckRequest<'_>) -> Result<CheckOutcome, SourceError> {
        let names = roles::all_roles(request.project, request.extra_roles);
        let roles: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
        let mut wait = Wait::new();
        // Only a guess, made to save a round trip: the check's own transaction confirms it.
        let guess = self.own.known(request.relation).filter(|known| needs_policies(&request, &known.table));
        let mut look = match guess {
            Some(known) => Look { known: Some(known), confirmed: false },
            None => self.read(&request, &roles, &mut wait).await?,
        };
        loop {
            let known = match look.known.as_ref() {
                Some(known) if look.confirmed || needs_policies(&request, &known.table) => known,
                None if look.confirmed => return Ok(gone(&request)),
                // What was remembered meanwhile decides nothing.
                _ => {
                    look = self.read(&request, &roles, &mut wait).await?;
                    continue;
                }
            };
            match self.step(&request, &roles, known, look.confirmed, &mut wait).await? {
                Next::Outcome(outcome) => return Ok(outcome),
                Next::Look(newer) => {
                    wait.bound()?;
                    look = newer;
                }
            }
        }
    }

    /// What a role may read of a table now, without any row; `None` when there is no such table. For validating
    /// filters and selections at a join: no policy runs. An unknown role may read nothing.
    pub async fn describe(
        &self,
        project: ProjectId,
        relation: &Relation,
        role: &str,
        extra_roles: &[String],
    ) -> Result<Option<(Arc<TableCatalog>, Arc<RoleAccess>)>, SourceError> {
        let names = roles::all_roles(project, extra_roles);
        let roles: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
        let Some(text) = self.own.read(relation, &roles).await?.table else { return Ok(None) };
        let known = self.own.learn(relation, text).await?;
        let access = compile::access(project, role, extra_roles, &known.table);
        Ok(Some((Arc::clone(&known.table), access)))
    }

    async fn step(
        &self,
        request: &CheckRequest<'_>,
        roles: &[&str],
        known: &Known,
        confirmed: bool,
        wait: &mut Wait,
    ) -> Result<Next, SourceError> {
        if !needs_policies(request, &known.table) {
            return Ok(Next::Outcome(by_catalogue(request, &known.table)));
        }
        let plan = Plan::new(request, &known.table, &self.identities);
        plan.questions.iter().for_each(|question| probe::start(self, request, &known.table, question));
        let asked = plan.questions.iter().filter(|question| question.asks());
        let judge = |question| Judge { pool: self, request, roles, known, question };
        let passes = try_join_all(asked.map(|question| async move { judge(question).run().await })).await?;
        // Nobody's policies had a say, so the catalogue was read by nobody.
        if passes.is_empty() && !confirmed {
            return Ok(Next::Look(self.read(request, roles, wait).await?));
        }
        let (mut answered, mut failed_statements) = (Vec::new(), 0);
        for pass in passes {
            match pass {
                Pass::Done(verdicts, failed) => {
                    answered.extend(verdicts);
                    failed_statements += failed;
                }
                Pass::NotYet => {
                    wait.pause().await?;
                    return Ok(Next::Look(Look { known: self.own.known(request.relation), confirmed: false }));
                }
                Pass::Changed(text) => return Ok(Next::Look(self.look(request.relation, text).await?)),
            }
        }
        let unjudgeable = plan.unjudgeable(request);
        let outcome = found(&known.table, true, plan.fill(answered));
        Ok(Next::Outcome(CheckOutcome { unjudgeable, failed_statements, ..outcome }))
    }

    /// Reads the catalogue on our own login, in a snapshot that sees every transaction of the batch.
    async fn read(&self, request: &CheckRequest<'_>, roles: &[&str], wait: &mut Wait) -> Result<Look, SourceError> {
        loop {
            let answer = match self.own.read(request.relation, roles).await {
                Err(error) if error.sqlstate() == Some(&SqlState::LOCK_NOT_AVAILABLE) => {
                    wait.bound()?;
                    tokio::time::sleep(LOCKED_WAIT).await;
                    continue;
                }
                answer => answer?,
            };
            if sees_all(&answer.snapshot, request.xids)? {
                return self.look(request.relation, answer.table).await;
            }
            wait.pause().await?;
        }
    }

    async fn look(&self, relation: &Relation, text: Option<String>) -> Result<Look, SourceError> {
        let known = match text {
            Some(text) => Some(self.own.learn(relation, text).await?),
            None => None,
        };
        Ok(Look { known, confirmed: true })
    }
}

/// The catalogue's state as a check knows it.
struct Look {
    known: Option<Arc<Known>>,
    /// Read in a snapshot that sees the whole batch.
    confirmed: bool,
}

enum Next {
    Outcome(CheckOutcome),
    Look(Look),
}

fn needs_policies(request: &CheckRequest<'_>, table: &TableCatalog) -> bool {
    table.row_security_enabled && table.oid == request.registered_oid
}

/// The outcome where no policy has a say.
fn by_catalogue(request: &CheckRequest<'_>, table: &Arc<TableCatalog>) -> CheckOutcome {
    let oid_matches = table.oid == request.registered_oid;
    let verdicts = if oid_matches { plan::without_policies(request, table) } else { replaced(request) };
    found(table, oid_matches, verdicts)
}

fn found(table: &Arc<TableCatalog>, oid_matches: bool, verdicts: Vec<Verdict>) -> CheckOutcome {
    let (row_security, table) = (table.row_security_enabled, Some(Arc::clone(table)));
    CheckOutcome { table, oid_matches, row_security, verdicts, unjudgeable: 0, failed_statements: 0 }
}

fn gone(request: &CheckRequest<'_>) -> CheckOutcome {
    let (verdicts, row_security, oid_matches) = (replaced(request), false, false);
    CheckOutcome { table: None, oid_matches, row_security, verdicts, unjudgeable: 0, failed_statements: 0 }
}

fn replaced(request: &CheckRequest<'_>) -> Vec<Verdict> {
    vec![Verdict::Error(IdentityErrorKind::TableReplaced); request.identities.len()]
}

fn sees_all(snapshot: &str, xids: &[u32]) -> Result<bool, SourceError> {
    let snapshot = Snapshot::parse(snapshot).ok_or(SourceError::Protocol("a snapshot that can't be read"))?;
    Ok(xids.iter().all(|xid| snapshot.sees(*xid)))
}

/// Back-off of one check.
struct Wait {
    deadline: Instant,
    next: Duration,
}

impl Wait {
    fn new() -> Self {
        Self { deadline: Instant::now() + VISIBLE_LIMIT, next: FIRST_WAIT }
    }

    async fn pause(&mut self) -> Result<(), SourceError> {
        self.bound()?;
        tokio::time::sleep(self.next).await;
        self.next = (self.next * 2).min(LONGEST_WAIT);
        Ok(())
    }

    fn bound(&self) -> Result<(), SourceError> {
        let late = SourceError::Timeout { what: "waiting for a stable view of the batch", limit: VISIBLE_LIMIT };
        if Instant::now() < self.deadline { Ok(()) } else { Err(late) }
    }
}
