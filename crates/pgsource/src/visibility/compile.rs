//! Conditions against a table's columns, at a join and again when a column's type has changed: what can't be decided is
//! refused here, in the original's words where it has them (supabase-wire.md §2.4, §3.6). No policy runs.

use std::{sync::Arc, time::Duration};

use aura_domain::{ProjectId, SqlName};
use tokio_postgres::error::SqlState;

use super::{
    VisibilityPool,
    conditions::{Asked, Probe, Tenant, asking_role, is_late},
    facts::Facts,
};
use crate::{
    RoleAccess, SourceError, TableCatalog,
    catalog::Column,
    conditions::{Compiled, Condition, Exact, Key, LikePattern, Operator, Question, Shape, Symbol, Test},
    roles,
};

/// For casting a filter's values, and for comparing one with itself.
const CAST_LIMIT: Duration = Duration::from_secs(1);
/// For a regular expression and what it is tried on: some take longer than the universe has.
const PATTERN_LIMIT: Duration = Duration::from_millis(200);
/// Longest regular expression, in bytes.
const MAX_REGEX: usize = 1024;
/// Length of the texts that a regular expression is tried on, in characters.
const TRIAL_LENGTH: usize = 2000;

/// `pg_collation.oid` of `default`, `C` and `POSIX`: all are deterministic.
const DETERMINISTIC: [u32; 3] = [100, 950, 951];
const BOOL: u32 = 16;
const VARCHAR: u32 = 1043;

/// Why conditions can't be used.
#[derive(Debug)]
pub enum CompileError {
    /// What the client is told: `ERROR 22P02 (invalid_text_representation) invalid input syntax for …`.
    Refused(String),
    /// PostgreSQL couldn't be asked.
    Source(SourceError),
}

impl From<SourceError> for CompileError {
    fn from(error: SourceError) -> Self {
        Self::Source(error)
    }
}

/// For whom conditions are compiled.
#[derive(Debug, Clone, Copy)]
pub struct Subscriber<'a> {
    /// Whose project.
    pub tenant: Tenant<'a>,
    /// Role word.
    pub role: &'a str,
    /// What the role may read of the table.
    pub access: &'a RoleAccess,
}

/// A condition on its way: what PostgreSQL is to be asked first.
struct Draft<'a> {
    condition: &'a Condition,
    shape: Shape,
    facts: Option<Arc<Facts>>,
    plan: Plan,
}

enum Plan {
    Done(Test),
    /// Values that PostgreSQL is to cast, for keys.
    Keys(Exact),
    /// Everything is PostgreSQL's.
    Ask(Symbol),
}

impl Tenant<'_> {
    /// What one of the project's roles may read of a table, by the table's catalogue; an unknown one may read nothing.
    pub fn access(&self, role: &str, table: &TableCatalog) -> Arc<RoleAccess> {
        access(self.project, role, self.extra_roles, table)
    }
}

pub(super) fn access(project: ProjectId, role: &str, extra_roles: &[String], table: &TableCatalog) -> Arc<RoleAccess> {
    let role = roles::allowed_role(project, role, extra_roles);
    let access = role.and_then(|role| table.access(&role).map(Arc::clone));
    let nothing = || RoleAccess { schema_usage: false, readable: vec![false; table.columns.len()] };
    access.unwrap_or_else(|| Arc::new(nothing()))
}

impl VisibilityPool {
    /// Checks conditions against the table's columns. `patience`: what PostgreSQL may take for them; what it took is taken
    /// off, and who takes longer is refused. Cancel-safe.
    pub async fn compile(
        &self,
        subscriber: Subscriber<'_>,
        table: &TableCatalog,
        conditions: &[Condition],
        patience: &mut Duration,
    ) -> Result<Vec<Arc<Compiled>>, CompileError> {
        self.try_compile(subscriber, table, conditions, false, patience).await
    }

    async fn try_compile(
        &self,
        subscriber: Subscriber<'_>,
        table: &TableCatalog,
        conditions: &[Condition],
        afresh: bool,
        patience: &mut Duration,
    ) -> Result<Vec<Arc<Compiled>>, CompileError> {
        let mut drafts = Vec::with_capacity(conditions.len());
        for condition in conditions {
            let column = readable_column(table, subscriber.access, &condition.column)
                .ok_or_else(|| raised(&format!("invalid column for filter {}", condition.column)))?;
            drafts.push(self.draft(condition, column, afresh).await?);
        }
        let role = asking_role(subscriber.tenant, subscriber.role)
            .ok_or_else(|| raised(&format!("role {:?} is not a role of this project", subscriber.role)))?;
        let mut probes = Vec::new();
        let counts: Vec<usize> = drafts
            .iter()
            .map(|draft| {
                let before = probes.len();
                probes.extend(draft.probes(&role));
                probes.len() - before
            })
            .collect();
        let mut rows = match self.ask_some(subscriber.tenant, &probes, patience).await {
            Ok(rows) => rows.into_iter(),
            Err(Asked::Outage(error)) => return Err(error.into()),
            Err(Asked::Raised(error)) if !afresh && is_about_names(&error) => {
                return Box::pin(self.try_compile(subscriber, table, conditions, true, patience)).await;
            }
            Err(Asked::Raised(error)) => return Err(refused(&error, &drafts)),
        };
        let mut compiled = Vec::with_capacity(drafts.len());
        for (draft, count) in drafts.into_iter().zip(counts) {
            let mine: Vec<_> = rows.by_ref().take(count).collect();
            let cast = match (&draft.plan, mine.first()) {
                (Plan::Keys(_), Some(row)) => row.try_get(0).map_err(SourceError::from)?,
                _ => Vec::new(),
            };
            compiled.push(Arc::new(draft.finish(subscriber.role, &cast)?));
        }
        // What costs a question comes last.
        compiled.sort_by_key(|condition| condition.decided_by() == crate::conditions::DecidedBy::Postgres);
        Ok(compiled)
    }

    async fn ask_some(
        &self,
        tenant: Tenant<'_>,
        probes: &[Probe],
        patience: &mut Duration,
    ) -> Result<Vec<tokio_postgres::Row>, Asked> {
        if probes.is_empty() { Ok(Vec::new()) } else { self.ask(tenant, probes, patience).await }
    }

    async fn draft<'a>(
        &self,
        condition: &'a Condition,
        column: &Column,
        afresh: bool,
    ) -> Result<Draft<'a>, CompileError> {
        let shape = Shape::of(column);
        let mut draft = Draft { condition, shape, facts: None, plan: Plan::Done(Test::IsNull) };
        if !draft.is_plain() {
            let facts = self.facts(shape, afresh).await?;
            draft.facts = Some(facts.ok_or_else(|| raised("the column's type is gone"))?);
        }
        draft.plan = draft.plan()?;
        Ok(draft)
    }
}

impl Compiled {
    /// A condition that nobody needs to be asked about: a built-in type and a plain value. `None` for all others.
    pub fn plain(condition: &Condition, column: &Column) -> Option<Self> {
        let mut draft = Draft { condition, shape: Shape::of(column), facts: None, plan: Plan::Done(Test::IsNull) };
        if !draft.is_plain() {
            return None;
        }
        draft.plan = draft.plan().ok()?;
        draft.finish("", &[]).ok()
    }
}

impl Draft<'_> {
    /// Whether nothing of the type's facts is needed.
    fn is_plain(&self) -> bool {
        let condition = self.condition;
        let Some(exact) = Exact::of_type(self.shape.base) else { return false };
        let built_in = self.shape.column_type == self.shape.base || self.shape.column_type == VARCHAR;
        let equality = matches!(condition.operator, Operator::Eq | Operator::Neq | Operator::In | Operator::IsDistinct);
        let order = matches!(condition.operator, Operator::Lt | Operator::Lte | Operator::Gt | Operator::Gte);
        let collation = if exact.is_collatable() {
            equality && DETERMINISTIC.contains(&self.shape.collation)
        } else {
            equality || order
        };
        built_in && collation && condition.values.iter().flatten().all(|value| exact.plain_input(value).is_some())
    }

    fn value(&self) -> &str {
        self.condition.values.first().and_then(Option::as_deref).unwrap_or_default()
    }

    fn shown(&self) -> &str {
        self.facts.as_ref().map_or("", |facts| &facts.shown)
    }

    fn plan(&self) -> Result<Plan, CompileError> {
        let symbol = match self.condition.operator {
            Operator::Is => return self.is().map(Plan::Done),
            Operator::Like => return self.like(),
            Operator::Ilike => return self.pattern(Symbol::Ilike),
            Operator::Match => return self.regex(Symbol::Match),
            Operator::Imatch => return self.regex(Symbol::Imatch),
            Operator::Eq | Operator::In | Operator::IsDistinct => Symbol::Eq,
            Operator::Neq => Symbol::Ne,
            Operator::Lt => Symbol::Lt,
            Operator::Lte => Symbol::Le,
            Operator::Gt => Symbol::Gt,
            Operator::Gte => Symbol::Ge,
        };
        let equality = matches!(symbol, Symbol::Eq | Symbol::Ne);
        let decidable = |exact: &Exact| {
            !exact.is_collatable()
                || match &self.facts {
                    // Without facts it is plain.
                    None => true,
                    Some(facts) => {
                        if equality {
                            facts.deterministic
                        } else {
                            facts.bytewise
                        }
                    }
                }
        };
        Ok(Exact::of_type(self.shape.base).filter(decidable).map_or(Plan::Ask(symbol), Plan::Keys))
    }

    fn is(&self) -> Result<Test, CompileError> {
        let word = self.value();
        if word != "null" && self.shape.base != BOOL {
            return Err(raised(&format!("is {word} filter requires a boolean column, got {}", self.shown())));
        }
        Ok(match word {
            "true" => Test::IsBool(true),
            "false" => Test::IsBool(false),
            _ => Test::IsNull,
        })
    }

    fn like(&self) -> Result<Plan, CompileError> {
        let plan = self.pattern(Symbol::Like)?;
        let Some(pattern) = LikePattern::parse(self.value()) else {
            return Err(told("22025", "invalid_escape_sequence", "LIKE pattern must not end with escape character"));
        };
        let exact = Exact::of_type(self.shape.base).is_some_and(Exact::is_collatable);
        let here =
            exact && pattern.is_cheap() && self.facts.as_ref().is_some_and(|facts| facts.deterministic && facts.utf8);
        Ok(if here { Plan::Done(Test::Like(pattern)) } else { plan })
    }

    fn pattern(&self, symbol: Symbol) -> Result<Plan, CompileError> {
        if self.facts.as_ref().is_some_and(|facts| facts.has_pattern(symbol)) {
            if symbol == Symbol::Ilike && LikePattern::parse(self.value()).is_none() {
                return Err(told(
                    "22025",
                    "invalid_escape_sequence",
                    "LIKE pattern must not end with escape character",
                ));
            }
            return Ok(Plan::Ask(symbol));
        }
        let operator = self.condition.operator.word();
        Err(raised(&format!("operator {operator} requires a text-compatible column type, got {}", self.shown())))
    }

    fn regex(&self, symbol: Symbol) -> Result<Plan, CompileError> {
        let plan = self.pattern(symbol)?;
        let invalid = |why: &str| {
            let operator = self.condition.operator.word();
            raised(&format!("invalid regular expression for {operator} filter: {why}"))
        };
        if self.value().len() > MAX_REGEX {
            return Err(invalid(&format!("it is longer than {MAX_REGEX} bytes")));
        }
        if has_back_reference(self.value()) {
            return Err(invalid("back-references are not supported, matching them may take for ever"));
        }
        Ok(plan)
    }

    /// What PostgreSQL is asked before the condition can be used.
    fn probes(&self, role: &SqlName) -> Vec<Probe> {
        let Some(facts) = &self.facts else { return Vec::new() };
        let values: Vec<&str> = self.condition.values.iter().flatten().map(String::as_str).collect();
        let cast = || Probe::cast(role, facts, &values, CAST_LIMIT);
        match self.plan {
            Plan::Done(_) => Vec::new(),
            Plan::Keys(_) => vec![cast()],
            Plan::Ask(symbol) if symbol.takes_pattern() => {
                let trials = trials(self.value());
                let pairs: Vec<_> = trials.iter().map(|trial| (trial.as_str(), self.value())).collect();
                vec![Probe::compare(role, facts, symbol, &pairs, PATTERN_LIMIT)]
            }
            Plan::Ask(symbol) => {
                let pairs: Vec<_> = values.iter().map(|value| (*value, *value)).collect();
                let compare = Probe::compare(role, facts, symbol, &pairs, CAST_LIMIT);
                // A domain's checks are for values, not for what is compared with them; but what they refuse is none.
                if self.shape.column_type == self.shape.base { vec![compare] } else { vec![cast(), compare] }
            }
        }
    }

    /// `cast`: PostgreSQL's output for the values, if it was asked.
    fn finish(self, role: &str, cast: &[Option<String>]) -> Result<Compiled, CompileError> {
        let test = match self.plan {
            Plan::Done(ref test) => test.clone(),
            Plan::Keys(exact) => self.keys(exact, cast)?,
            Plan::Ask(symbol) => self.ask(symbol, role),
        };
        Ok(Compiled::new(self.condition.clone(), self.shape, test))
    }

    fn keys(&self, exact: Exact, cast: &[Option<String>]) -> Result<Test, CompileError> {
        let values = self.condition.values.iter().flatten();
        let keys: Option<Vec<Key>> = match self.facts {
            None => values.map(|value| exact.plain_input(value)).collect(),
            Some(_) => cast.iter().map(|text| exact.key(text.as_deref()?)).collect(),
        };
        let mut keys = keys.ok_or(SourceError::Protocol("a value in another form than its type's"))?;
        if matches!(self.condition.operator, Operator::Eq | Operator::In) {
            keys.sort_unstable();
            keys.dedup();
            return Ok(Test::OneOf(exact, keys, self.condition.values.contains(&None)));
        }
        let key = keys.pop().ok_or(SourceError::Protocol("a condition without a value"))?;
        Ok(match self.condition.operator {
            Operator::Neq => Test::Neq(exact, key),
            Operator::Lt => Test::Lt(exact, key),
            Operator::Lte => Test::Lte(exact, key),
            Operator::Gt => Test::Gt(exact, key),
            Operator::Gte => Test::Gte(exact, key),
            _ => Test::Distinct(exact, key),
        })
    }

    fn ask(&self, symbol: Symbol, role: &str) -> Test {
        let question = |operand: &String| {
            let Shape { column_type, base, collation } = self.shape;
            let (role, operand) = (role.to_owned(), operand.clone());
            Arc::new(Question { role, column_type, base, collation, symbol, operand })
        };
        let questions: Vec<_> = self.condition.values.iter().flatten().map(question).collect();
        match (self.condition.operator, questions.as_slice()) {
            (Operator::IsDistinct, [one]) => Test::AskDistinct(Arc::clone(one)),
            (Operator::In, _) | (_, [] | [_, _, ..]) => Test::AskAny(questions, self.condition.values.contains(&None)),
            (_, [one]) => Test::Ask(Arc::clone(one)),
        }
    }
}

/// A column that isn't there and one that the role may not read look the same.
fn readable_column<'a>(table: &'a TableCatalog, access: &RoleAccess, name: &str) -> Option<&'a Column> {
    let n = table.column(name)?;
    (access.schema_usage && access.readable.get(n) == Some(&true)).then(|| &table.columns[n])
}

/// Matching a back-reference takes exponential time at worst. Whatever might be one is taken for one.
fn has_back_reference(regex: &str) -> bool {
    let mut chars = regex.chars();
    while let Some(c) = chars.next() {
        if c == '\\' && matches!(chars.next(), Some('1'..='9')) {
            return true;
        }
    }
    false
}

/// Texts that make a bad pattern slow: each of its own characters again and again, then all of them, then what it can't
/// end with.
fn trials(pattern: &str) -> Vec<String> {
    let mut letters: Vec<char> = pattern.chars().filter(|c| c.is_alphanumeric()).collect();
    letters.dedup();
    letters.truncate(6);
    let repeated = |text: &str| text.chars().cycle().take(TRIAL_LENGTH).chain("\u{1}!".chars()).collect::<String>();
    let mut trials = vec![String::new(), repeated("a"), repeated("a0 ")];
    trials.extend(letters.iter().map(|letter| repeated(&letter.to_string())));
    let plain: String = pattern.chars().filter(|c| !c.is_control()).collect();
    if !plain.is_empty() {
        trials.push(repeated(&plain));
    }
    trials
}

/// In the words of an exception of the original's own checks.
fn raised(message: &str) -> CompileError {
    told("P0001", "raise_exception", message)
}

fn told(code: &str, name: &str, message: &str) -> CompileError {
    CompileError::Refused(format!("ERROR {code} ({name}) {message}"))
}

/// Types and schemas may have other names since their facts were read.
pub(super) fn is_about_names(error: &SourceError) -> bool {
    let names = [SqlState::UNDEFINED_OBJECT, SqlState::INVALID_SCHEMA_NAME, SqlState::UNDEFINED_FUNCTION];
    error.sqlstate().is_some_and(|code| names.contains(code))
}

/// What PostgreSQL said of a filter's values, or of an operator that isn't there. The message may quote the client's own
/// values; no row was involved.
fn refused(error: &SourceError, drafts: &[Draft<'_>]) -> CompileError {
    if is_late(error) {
        return told("57014", "query_canceled", "the filter takes too long to evaluate");
    }
    let SourceError::Sql(sql) = error else { return raised("the filter could not be checked") };
    let Some(db) = sql.as_db_error() else { return raised("the filter could not be checked") };
    if *db.code() == SqlState::INVALID_REGULAR_EXPRESSION {
        let regex = |draft: &&Draft<'_>| matches!(draft.condition.operator, Operator::Match | Operator::Imatch);
        let operator = drafts.iter().find(regex).map_or("match", |draft| draft.condition.operator.word());
        return raised(&format!("invalid regular expression for {operator} filter: {}", db.message()));
    }
    told(db.code().code(), condition_name(db.code()), db.message())
}

/// PostgreSQL's name for the codes that a cast or an operator is likely to raise.
fn condition_name(code: &SqlState) -> &'static str {
    match *code {
        SqlState::INVALID_TEXT_REPRESENTATION => "invalid_text_representation",
        SqlState::NUMERIC_VALUE_OUT_OF_RANGE => "numeric_value_out_of_range",
        SqlState::INVALID_DATETIME_FORMAT => "invalid_datetime_format",
        SqlState::DATETIME_FIELD_OVERFLOW => "datetime_field_overflow",
        SqlState::UNDEFINED_FUNCTION => "undefined_function",
        SqlState::UNDEFINED_OBJECT => "undefined_object",
        SqlState::CHECK_VIOLATION => "check_violation",
        SqlState::NOT_NULL_VIOLATION => "not_null_violation",
        SqlState::INSUFFICIENT_PRIVILEGE => "insufficient_privilege",
        SqlState::FEATURE_NOT_SUPPORTED => "feature_not_supported",
        SqlState::RAISE_EXCEPTION => "raise_exception",
        _ => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_references_are_found_and_other_escapes_are_not() {
        for regex in [r"(a)\1", r"\\\1", r"(.)(.)\2"] {
            assert!(has_back_reference(regex), "{regex}");
        }
        for regex in ["a1", r"\d+", r"\\1", r"\."] {
            assert!(!has_back_reference(regex), "{regex}");
        }
    }
}
