//! Conditions that PostgreSQL decides. Casts and operators are code of the tenant, so this runs where the policies run: on
//! a connection of the project's visibility login, as the subscriber's role, in a transaction that can't write (R-RLS-9);
//! but never in the statement that judges policies (R-RLS-5).

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use aura_domain::{ProjectId, SqlName, quote_ident};
use secrecy::SecretString;
use tokio_postgres::{
    Row,
    error::SqlState,
    types::{ToSql, Type},
};

use super::{
    VisibilityPool,
    compile::is_about_names,
    facts::Facts,
    sessions::{Session, Sessions},
    standing::{Ask, Standing},
    statement,
};
use crate::{
    SourceError,
    conditions::{Answers, Question, Shape, Symbol},
    roles,
};

/// `statement_timeout` of one statement.
const LIMIT: Duration = Duration::from_secs(1);
/// Time for the network on top of it.
const NETWORK: Duration = Duration::from_secs(1);
/// All that is asked for one batch: no statement begins later, and what isn't answered by then fails.
const BUDGET: Duration = Duration::from_secs(6);
/// Bytes of values and operands, and pairs, that one statement compares.
const CHUNK_BYTES: usize = 4 << 20;
const CHUNK_PAIRS: usize = 50_000;
/// Facts kept per source.
const MAX_FACTS: usize = 4096;

const BEGIN: &str = "begin read only";
/// Parameters: role, search path, time limit in milliseconds. The claims are nobody's: an operator has no business with
/// them. `set_config` is evaluated from left to right.
const BECOME: &str = "select pg_catalog.set_config('role', $1, true), \
     pg_catalog.set_config('search_path', $2, true), \
     pg_catalog.set_config('row_security', 'on', true), \
     pg_catalog.set_config('statement_timeout', $3, true), \
     pg_catalog.set_config('request.jwt.claims', '{}', true)";

/// On whose behalf PostgreSQL is asked.
#[derive(Debug, Clone, Copy)]
pub struct Tenant<'a> {
    /// Tenant.
    pub project: ProjectId,
    /// Password of the project's visibility login.
    pub password: &'a SecretString,
    /// The project's role words besides the built-in three.
    pub extra_roles: &'a [String],
}

/// What the pool remembers of conditions.
#[derive(Default)]
pub(super) struct Memory {
    facts: Mutex<HashMap<Shape, Arc<Facts>>>,
    /// None is a member of a group: who is slow says nothing of the others.
    standing: Standing<Arc<Question>, (), ProjectId>,
}

/// A statement that may run code of the tenant.
pub(super) struct Probe {
    pub(super) role: SqlName,
    /// Schema of the type: its operators are found there.
    pub(super) schema: String,
    pub(super) limit: Duration,
    pub(super) sql: String,
    pub(super) params: Params,
}

/// A probe's parameters.
pub(super) enum Params {
    Values(String),
    /// Values, operands, and which of both make the pairs.
    Pairs(String, String, Vec<i32>, Vec<i32>),
}

/// Questions that one statement asks: of one role, type, collation and operator.
type Group = Vec<(Arc<Question>, Arc<str>)>;

impl VisibilityPool {
    /// Asks PostgreSQL what is open and notes its answers. A question that raises an error or is late fails; one that was
    /// late before fails at once, until a probe that nobody waits for went well. All others are answered. `Err`: the source
    /// can't be reached, or has no place for the project now; nothing is lost.
    pub async fn decide(&self, tenant: Tenant<'_>, answers: &mut Answers) -> Result<(), SourceError> {
        let deadline = Instant::now() + BUDGET;
        let mut groups: HashMap<(String, Shape, Symbol), Group> = HashMap::new();
        let mut apart = Vec::new();
        let open = answers.take_open();
        let who = open.iter().map(|(question, _)| question);
        let asks = self.conditions.standing.how_alone(&tenant.project, who, Instant::now());
        for ((question, values), ask) in open.into_iter().zip(asks) {
            let pairs: Group = values.into_iter().map(|value| (Arc::clone(&question), value)).collect();
            match ask {
                Ask::Not { probe } => {
                    if probe {
                        self.probe(tenant, &question, &pairs).await?;
                    }
                    pairs.into_iter().for_each(|(question, value)| answers.note(&question, value, None));
                }
                Ask::Apart => apart.push(pairs),
                Ask::Together => {
                    let key = (question.role.clone(), question.shape(), question.symbol);
                    groups.entry(key).or_default().extend(pairs);
                }
            }
        }
        for mut rest in groups.into_values().chain(apart) {
            while !rest.is_empty() {
                let chunk = take_chunk(&mut rest);
                // Nobody is blamed for what others took.
                let late = Instant::now() >= deadline;
                let found = if late { vec![None; chunk.len()] } else { self.group(tenant, &chunk, deadline).await? };
                for ((question, value), answer) in chunk.into_iter().zip(found) {
                    answers.note(&question, value, answer);
                }
            }
        }
        Ok(())
    }

    /// One statement for all; after an error one for each question (R-RLS-6).
    async fn group(
        &self,
        tenant: Tenant<'_>,
        pairs: &[(Arc<Question>, Arc<str>)],
        deadline: Instant,
    ) -> Result<Vec<Option<Option<bool>>>, SourceError> {
        let (mut answers, first) = (vec![None; pairs.len()], &pairs[0].0);
        let shape = first.shape();
        let (Some(role), Some(facts)) = (asking_role(tenant, &first.role), self.facts(shape, false).await?) else {
            return Ok(answers);
        };
        match self.compare(tenant, &role, &facts, pairs).await {
            Ok(found) => return Ok(found.into_iter().map(Some).collect()),
            Err(Asked::Outage(error)) => return Err(error),
            Err(Asked::Raised(error)) => {
                let alone = pairs.iter().all(|(question, _)| Arc::ptr_eq(question, first));
                if alone && !is_about_names(&error) {
                    self.conditions.failed(tenant.project, first, &error);
                    return Ok(answers);
                }
            }
        }
        // A type or schema may have another name now.
        let Some(facts) = self.facts(shape, true).await? else { return Ok(answers) };
        let mut at = 0;
        for few in pairs.chunk_by(|a, b| Arc::ptr_eq(&a.0, &b.0)) {
            if Instant::now() < deadline {
                match self.compare(tenant, &role, &facts, few).await {
                    Ok(found) => {
                        let slots = answers[at..at + few.len()].iter_mut();
                        slots.zip(found).for_each(|(slot, it)| *slot = Some(it));
                    }
                    Err(Asked::Outage(error)) => return Err(error),
                    Err(Asked::Raised(error)) => self.conditions.failed(tenant.project, &few[0].0, &error),
                }
            }
            at += few.len();
        }
        Ok(answers)
    }

    /// Asks a question that was late once more, in the background.
    async fn probe(
        &self,
        tenant: Tenant<'_>,
        question: &Arc<Question>,
        pairs: &[(Arc<Question>, Arc<str>)],
    ) -> Result<(), SourceError> {
        let facts = self.facts(question.shape(), false).await?;
        let Some((role, facts)) = asking_role(tenant, &question.role).zip(facts) else { return Ok(()) };
        let probe = Probe::compare(&role, &facts, question.symbol, &texts(pairs), LIMIT);
        let (project, password, question) = (tenant.project, tenant.password.clone(), Arc::clone(question));
        let (sessions, memory) = (Arc::clone(&self.sessions), Arc::clone(&self.conditions));
        tokio::spawn(async move {
            let asked = match sessions.spare(project, &password).await {
                Ok(Some(session)) => ask(&sessions, session, std::slice::from_ref(&probe), &mut LIMIT.clone()).await,
                Ok(None) => return memory.standing.put_off(&project, &question),
                Err(error) => Err(error),
            };
            match asked {
                Ok(_) => memory.standing.recovered(&project, &question),
                Err(error) => memory.failed(project, &question, &error),
            }
        });
        Ok(())
    }

    async fn compare(
        &self,
        tenant: Tenant<'_>,
        role: &SqlName,
        facts: &Facts,
        pairs: &[(Arc<Question>, Arc<str>)],
    ) -> Result<Vec<Option<bool>>, Asked> {
        let probe = Probe::compare(role, facts, pairs[0].0.symbol, &texts(pairs), LIMIT);
        let rows = self.ask(tenant, std::slice::from_ref(&probe), &mut LIMIT.clone()).await?;
        let found: Vec<Option<bool>> = rows[0].try_get(0).map_err(|error| Asked::Raised(error.into()))?;
        if found.len() == pairs.len() {
            Ok(found)
        } else {
            Err(Asked::Raised(SourceError::Protocol("answers missing")))
        }
    }

    /// Runs statements that may run code of the tenant, in one transaction; the first error ends it. What they took is taken
    /// off `patience`, and none may take longer than what is left.
    pub(super) async fn ask(
        &self,
        tenant: Tenant<'_>,
        probes: &[Probe],
        patience: &mut Duration,
    ) -> Result<Vec<Row>, Asked> {
        let asked = match self.sessions.take(tenant.project, tenant.password).await {
            Ok(session) => ask(&self.sessions, session, probes, patience).await,
            Err(busy @ SourceError::Busy { .. }) => return Err(Asked::Outage(busy)),
            Err(error) => Err(error),
        };
        match asked {
            Ok(rows) => Ok(rows),
            Err(error) if error.is_connection_error() => Err(self.blame(error).await),
            Err(error) => Err(Asked::Raised(error)),
        }
    }

    /// A lost connection is an outage only if our own login can't connect either (R-RLS-6).
    async fn blame(&self, error: SourceError) -> Asked {
        if matches!(error, SourceError::Shut) {
            return Asked::Outage(error);
        }
        match self.own.probe().await {
            Ok(()) => Asked::Raised(error),
            Err(outage) => Asked::Outage(outage),
        }
    }

    /// What is known of a type; `None`: it is gone.
    pub(super) async fn facts(&self, shape: Shape, again: bool) -> Result<Option<Arc<Facts>>, SourceError> {
        if let Some(facts) = lock(&self.conditions.facts).get(&shape).filter(|_| !again) {
            return Ok(Some(Arc::clone(facts)));
        }
        let facts = Facts::read(&self.own, shape).await?;
        let mut known = lock(&self.conditions.facts);
        if known.len() >= MAX_FACTS {
            known.clear();
        }
        match &facts {
            Some(facts) => drop(known.insert(shape, Arc::clone(facts))),
            None => drop(known.remove(&shape)),
        }
        Ok(facts)
    }
}

/// Why there is no answer.
pub(super) enum Asked {
    /// By the fault of what was asked.
    Raised(SourceError),
    /// The source can't be reached, or has no place for it now.
    Outage(SourceError),
}

impl Memory {
    fn failed(&self, project: ProjectId, question: &Arc<Question>, error: &SourceError) {
        // Neither values nor operands: both are users' data.
        tracing::warn!(%project, operator = question.symbol.name(), column_type = question.column_type, code = ?error.sqlstate(),
            "a filter's condition could not be decided");
        if is_late(error) {
            self.standing.timed_out(&project, &(), question, Instant::now());
        } else {
            self.standing.raised(&project, &(), question, Instant::now());
        }
    }
}

impl Question {
    pub(super) fn shape(&self) -> Shape {
        Shape { column_type: self.column_type, base: self.base, collation: self.collation }
    }
}

impl Probe {
    /// Compares (value, operand) pairs; answers a `bool[]` in their order. Values become what they were by the type's
    /// input function, as a literal would: a cast from text may be another function.
    pub(super) fn compare(
        role: &SqlName,
        facts: &Facts,
        symbol: Symbol,
        pairs: &[(&str, &str)],
        limit: Duration,
    ) -> Self {
        let right = facts.right_sql(symbol);
        let sql = format!(
            "select array(select ({x}{collate} {symbol} {y}) from rows from (pg_catalog.unnest($3::pg_catalog.int4[]), \
             pg_catalog.unnest($4::pg_catalog.int4[])) with ordinality as _aura_p (i, j, n) \
             join pg_catalog.json_to_recordset($1::pg_catalog.text::pg_catalog.json) as _aura_v (i pg_catalog.int4, x {left_in}) \
             on _aura_v.i operator(pg_catalog.=) _aura_p.i \
             join pg_catalog.json_to_recordset($2::pg_catalog.text::pg_catalog.json) as _aura_f (i pg_catalog.int4, x {right_in}) \
             on _aura_f.i operator(pg_catalog.=) _aura_p.j \
             order by _aura_p.n)",
            x = value_sql("_aura_v.x", &facts.sql),
            y = value_sql("_aura_f.x", right),
            collate = facts.collate(),
            symbol = symbol.name(),
            left_in = input_sql(&facts.sql),
            right_in = input_sql(right),
        );
        let (mut values, mut operands) = (Numbered::default(), Numbered::default());
        let (i, j) = pairs.iter().map(|(value, operand)| (values.number(value), operands.number(operand))).unzip();
        let params = Params::Pairs(values.json(), operands.json(), i, j);
        Self { role: role.clone(), schema: facts.schema.clone(), limit, sql, params }
    }

    /// Casts texts to the column's own type, a domain's checks included; answers a `text[]` of PostgreSQL's output.
    pub(super) fn cast(role: &SqlName, facts: &Facts, values: &[&str], limit: Duration) -> Self {
        let sql = format!(
            "select array(select {x}::pg_catalog.text from pg_catalog.json_to_recordset($1::pg_catalog.text::pg_catalog.json) \
             as _aura_v (i pg_catalog.int4, x {input}) order by _aura_v.i)",
            x = value_sql("_aura_v.x", &facts.own_sql),
            input = input_sql(&facts.own_sql),
        );
        let all: Vec<_> = values.iter().enumerate().map(|(n, value)| serde_json::json!({"i": n, "x": value})).collect();
        let params = Params::Values(serde_json::Value::Array(all).to_string());
        Self { role: role.clone(), schema: facts.schema.clone(), limit, sql, params }
    }
}

/// Distinct texts, in the order in which they came.
#[derive(Default)]
struct Numbered<'a> {
    numbers: HashMap<&'a str, i32>,
    texts: Vec<&'a str>,
}

impl<'a> Numbered<'a> {
    fn number(&mut self, text: &'a str) -> i32 {
        *self.numbers.entry(text).or_insert_with(|| {
            self.texts.push(text);
            i32::try_from(self.texts.len()).expect("a chunk has fewer pairs")
        })
    }

    /// `[{"i":1,"x":"…"},…]`
    fn json(&self) -> String {
        let all = self.texts.iter().zip(1..).map(|(text, n)| serde_json::json!({"i": n, "x": text}));
        serde_json::Value::Array(all.collect()).to_string()
    }
}

/// A JSON string stays one in a column of these types, so they take a detour.
fn is_json(sql: &str) -> bool {
    ["pg_catalog.json", "pg_catalog.jsonb"].contains(&sql.replace('"', "").as_str())
}

fn input_sql(sql: &str) -> &str {
    if is_json(sql) { "pg_catalog.text" } else { sql }
}

fn value_sql(column: &str, sql: &str) -> String {
    if is_json(sql) { format!("({column}::{sql})") } else { format!("({column})") }
}

/// Nobody becomes the service role in the database; the authenticated one stands in for it.
pub(super) fn asking_role(tenant: Tenant<'_>, word: &str) -> Option<SqlName> {
    let word = if word == roles::SERVICE_ROLE { roles::AUTHENTICATED } else { word };
    roles::allowed_role(tenant.project, word, tenant.extra_roles)
}

fn texts(pairs: &[(Arc<Question>, Arc<str>)]) -> Vec<(&str, &str)> {
    pairs.iter().map(|(question, value)| (&**value, question.operand.as_str())).collect()
}

/// Takes as many pairs as one statement is to compare. All of one question stay together where they fit.
fn take_chunk(rest: &mut Group) -> Group {
    let mut bytes = 0;
    let fits = |(question, value): &&(Arc<Question>, Arc<str>)| {
        bytes += value.len() + question.operand.len();
        bytes <= CHUNK_BYTES
    };
    let count = rest.iter().take(CHUNK_PAIRS).take_while(fits).count().max(1);
    let later = rest.split_off(count);
    std::mem::replace(rest, later)
}

/// A connection that is late or broken isn't used again.
async fn ask(
    sessions: &Sessions,
    session: Session,
    probes: &[Probe],
    patience: &mut Duration,
) -> Result<Vec<Row>, SourceError> {
    let limit = NETWORK + probes.iter().map(|probe| probe.limit).sum::<Duration>().min(*patience);
    let late = SourceError::Timeout { what: "asking about a filter", limit };
    let asked = tokio::time::timeout(limit, run(&session, probes, patience)).await.unwrap_or(Err(late));
    if !asked.as_ref().is_err_and(SourceError::is_connection_error) && clean(&session).await {
        sessions.put_back(session);
    }
    asked
}

async fn run(session: &Session, probes: &[Probe], patience: &mut Duration) -> Result<Vec<Row>, SourceError> {
    let mut rows = Vec::with_capacity(probes.len());
    session.client.batch_execute(BEGIN).await?;
    for probe in probes {
        session.client.batch_execute(statement::RESET).await?;
        // Zero would be no limit.
        let limit = probe.limit.min(*patience).as_millis().max(1).to_string();
        let path = match probe.schema.as_str() {
            "pg_catalog" => "pg_catalog".to_owned(),
            schema => format!("pg_catalog, {}", quote_ident(schema)),
        };
        let texts = [probe.role.as_str(), &path, &limit];
        let texts = texts.each_ref().map(|text| (text as &(dyn ToSql + Sync), Type::TEXT));
        session.client.query_typed_opt(BECOME, &texts).await?;
        let began = Instant::now();
        let answer = match &probe.params {
            Params::Values(values) => session.client.query_typed_opt(&probe.sql, &[(values, Type::TEXT)]).await?,
            Params::Pairs(values, operands, i, j) => {
                let params: [(&(dyn ToSql + Sync), Type); 4] =
                    [(values, Type::TEXT), (operands, Type::TEXT), (i, Type::INT4_ARRAY), (j, Type::INT4_ARRAY)];
                session.client.query_typed_opt(&probe.sql, &params).await?
            }
        };
        *patience = patience.saturating_sub(began.elapsed());
        rows.push(answer.ok_or(SourceError::Protocol("no row"))?);
    }
    Ok(rows)
}

/// Ends the transaction and takes away what the tenant's code left in the session; whether it can be used again.
async fn clean(session: &Session) -> bool {
    let cleaning = async {
        session.client.batch_execute(statement::ROLLBACK).await?;
        session.client.batch_execute(statement::DISCARD).await
    };
    matches!(tokio::time::timeout(NETWORK, cleaning).await, Ok(Ok(())))
}

/// Whether the time limit ended it.
pub(super) fn is_late(error: &SourceError) -> bool {
    matches!(error, SourceError::Timeout { .. }) || error.sqlstate() == Some(&SqlState::QUERY_CANCELED)
}

/// The maps are consistent at every step, so a panic elsewhere doesn't matter.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
