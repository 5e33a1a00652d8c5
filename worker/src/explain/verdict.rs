//! The steps of a verdict, each by the code that delivery uses.

use std::sync::Arc;

use aura_domain::{
    Change, ChangeKind, Image, Position, SubscriptionSpec, Value as Cell,
    explain::{Explanation, Question, StepName, Which},
};
use aura_pgsource::{
    RoleAccess, SourceError, TableCatalog,
    visibility::{CheckRequest, Identity, PolicyQuestion, PolicyVerdict, PolicyWord, Verdict},
};
use jiff::Timestamp;
use serde_json::{Map, Value, json};

use super::{
    Explainer,
    recent::{Fate, Remembered},
    row,
    said::{judged, policy},
    steps::Steps,
};
use crate::{
    engine::{
        gaps,
        registry::{RegisteredTable, Registry},
    },
    subs::{
        admission,
        index::{ActiveSubscription, TableKey},
    },
};

pub(super) const UNREACHABLE: &str = "The source database can't be asked now.";

/// A row to be judged, remembered or made up.
struct Subject {
    kind: ChangeKind,
    new: Option<Image>,
    old: Option<Image>,
    xids: Vec<u32>,
}

impl Subject {
    fn of(change: &Change) -> Self {
        Self { kind: change.kind, new: change.new.clone(), old: change.old.clone(), xids: vec![change.xid] }
    }

    /// R-RLS-1: the image that decides.
    fn deciding(&self) -> Option<&Image> {
        self.new.as_ref().or(self.old.as_ref())
    }
}

/// The table, as it is now, and what the role may read of it.
struct Described {
    table: Arc<TableCatalog>,
    access: Arc<RoleAccess>,
}

impl Explainer {
    /// The verdict. Steps that can't be taken are null, never guessed.
    pub(super) async fn explain(&self, question: &Question) -> Explanation {
        let registry = Arc::clone(&self.control.registry.borrow());
        let spec = &question.subscription;
        let mut steps = Steps::default();
        let key = TableKey::of(spec);
        let found = key.as_ref().and_then(|key| self.find(key, &question.change));
        let at = match (&question.change, &found) {
            (_, Some(known)) => Some(known.position),
            (Which::At(position), None) => Some(*position),
            _ => None,
        };
        let remembered = key.as_ref().and_then(|key| self.recent.range(key));
        let table = key.as_ref().and_then(|key| registered(&mut steps, &registry, key));
        if let Some(table) = table {
            self.in_filter(&mut steps, table, at, found.as_ref());
            self.rest(&mut steps, &registry, table, question, found.as_ref()).await;
        }
        let made_up = matches!(question.change, Which::MadeUp(_));
        let (outcome, reason) = (steps.ending(made_up), steps.failed());
        Explanation { outcome, reason, position: at, remembered, steps: steps.finish() }
    }

    fn find(&self, key: &TableKey, which: &Which) -> Option<Remembered> {
        match which {
            Which::Newest => self.recent.newest(key),
            Which::Row(values) => self.recent.newest_of(key, values),
            Which::At(position) => self.recent.at(key.project, *position),
            Which::MadeUp(_) => None,
        }
    }

    /// R-HOLE-2: from where on every change of the table is read.
    fn in_filter(&self, steps: &mut Steps, table: &RegisteredTable, at: Option<Position>, found: Option<&Remembered>) {
        let covered = self.covered.borrow().clone();
        let since = covered.filter(|covered| covered.covers(table.registration, &table.relation));
        let since = since.map(|covered| covered.since(table));
        let detail = json!({"active_since_lsn": since, "commit_lsn": at.map(|at| at.commit)});
        let (passed, message) = match (since, at) {
            _ if found.is_some() => (Some(true), "The change came through the filter.".to_owned()),
            (None, None) => (Some(false), "The running filter doesn't cover the table yet.".to_owned()),
            (None, Some(_)) => (None, "The running filter doesn't cover the table yet.".to_owned()),
            (Some(since), None) => (Some(true), format!("The filter covers the table since {since}.")),
            (_, Some(at)) if at.commit < table.enabled_at() => {
                let message = format!("It was committed at {}, before realtime was turned on.", at.commit);
                (Some(false), message)
            }
            (Some(since), Some(at)) if at.commit < since => {
                // An earlier run may have read it.
                (None, format!("It was committed at {}, the engine's filter is of {since}.", at.commit))
            }
            (Some(since), Some(_)) => (Some(true), format!("The filter covers the table since {since}, before it.")),
        };
        steps.add(StepName::InFilter, passed, message, detail);
    }

    async fn rest(
        &self,
        steps: &mut Steps,
        registry: &Registry,
        table: &RegisteredTable,
        question: &Question,
        found: Option<&Remembered>,
    ) {
        let spec = &question.subscription;
        let described = self.describe(table, spec).await;
        let mine = found.filter(|found| found.table.key == table.key);
        let row = if mine.is_none() && found.is_some() {
            steps.add(StepName::Decoded, Some(true), "The worker has read it: a change of another table.", Value::Null);
            None
        } else {
            decoded(steps, question, mine, described.as_ref().ok().and_then(Option::as_ref))
        };
        let kind = row.as_ref().map(|row| row.kind).or_else(|| found.map(|known| known.kind));
        binding(steps, spec, kind, found);
        let image = row.as_ref().and_then(Subject::deciding);
        let active = self.filter(steps, registry, table, (spec, image)).await;
        let described = match described {
            Ok(Some(described)) => described,
            Ok(None) => {
                let message = "The role may read nothing: the table is gone.";
                return steps.add(StepName::Grants, Some(false), message, Value::Null);
            }
            Err(error) => {
                tracing::debug!(source = %self.control.source, %error, "a table can't be described for an explanation");
                return steps.add(StepName::Grants, None, UNREACHABLE, Value::Null);
            }
        };
        grants(steps, spec, table, &described);
        let old_visible = match &row {
            _ if !described.access.any() => {
                steps.add(StepName::Policies, None, "Not asked: the role may read nothing.", Value::Null);
                None
            }
            Some(row) => self.policies(steps, spec, table, row, &described).await,
            None => {
                let message = "The row's images are not remembered, so no policy can be asked.";
                steps.add(StepName::Policies, None, message, Value::Null);
                None
            }
        };
        columns(steps, spec, &described, active.as_ref(), row.as_ref(), old_visible);
        self.sent(steps, question, mine);
    }

    async fn describe(
        &self,
        table: &RegisteredTable,
        spec: &SubscriptionSpec,
    ) -> Result<Option<Described>, SourceError> {
        let project = &table.project;
        let described =
            self.control.visibility.describe(project.id, &table.relation, &spec.role, &project.extra_roles).await?;
        Ok(described.map(|(table, access)| Described { table, access }))
    }

    /// Answers whether the old image is visible, too.
    async fn policies(
        &self,
        steps: &mut Steps,
        spec: &SubscriptionSpec,
        table: &RegisteredTable,
        row: &Subject,
        described: &Described,
    ) -> Option<bool> {
        let Some(image) = row.deciding() else {
            steps.add(StepName::Policies, None, "The change has no row.", Value::Null);
            return None;
        };
        let identity = Identity { role: spec.role.clone(), claims: spec.claims.clone() };
        let mut said = Vec::new();
        if described.table.row_security_enabled {
            let (project, visibility) = (&table.project, &self.control.visibility);
            let question = PolicyQuestion {
                project: project.id,
                password: &project.visibility_password,
                table: &described.table,
                identity: &identity,
                extra_roles: &project.extra_roles,
                image,
            };
            said = match visibility.policies(question).await {
                Ok(said) => said,
                Err(error) => {
                    tracing::debug!(source = %self.control.source, %error, "policies can't be asked for an explanation");
                    steps.add(StepName::Policies, None, UNREACHABLE, Value::Null);
                    return None;
                }
            };
        }
        let claims: Value = serde_json::from_str(spec.claims.as_json()).unwrap_or_default();
        let shown: Vec<Value> = said.iter().map(policy).collect();
        let mut detail = json!({"row_security": described.table.row_security_enabled, "role": spec.role, "claims": claims,
            "policies": shown});
        // A check that runs into its time limit counts against the identity; that a policy does is known here.
        if let Some(slow) = said.iter().find(|policy| policy.said == PolicyWord::TimedOut) {
            detail["error"] = json!("timed_out");
            let message = format!("The policy {:?} took longer than 2 s, so nobody is shown the row.", slow.name);
            steps.add(StepName::Policies, Some(false), message, detail);
            return None;
        }
        self.judge(steps, table, row, &identity, (&said, detail)).await
    }

    /// The verdict is delivery's own.
    async fn judge(
        &self,
        steps: &mut Steps,
        table: &RegisteredTable,
        row: &Subject,
        identity: &Identity,
        (said, mut detail): (&[PolicyVerdict], Value),
    ) -> Option<bool> {
        let images: Vec<&Image> = row.new.iter().chain(&row.old).collect();
        let request = CheckRequest {
            wanted: None,
            project: table.project.id,
            password: &table.project.visibility_password,
            extra_roles: &table.project.extra_roles,
            relation: &table.relation,
            registered_oid: table.oid,
            xids: &row.xids,
            images: &images,
            identities: std::slice::from_ref(identity),
        };
        let Ok(outcome) = self.control.visibility.check(request).await else {
            steps.add(StepName::Policies, None, UNREACHABLE, detail);
            return None;
        };
        let (passed, code, message) = judged(&outcome, said, identity);
        if let Some(code) = code {
            detail["error"] = json!(code);
        }
        let visible = match outcome.verdicts.first() {
            Some(Verdict::Decided { visible, .. }) => visible.as_slice(),
            _ => &[],
        };
        let old = row.old.as_ref().and_then(|_| visible.last().copied());
        if row.new.is_some() && row.old.is_some() {
            detail["old_row_visible"] = json!(old);
        }
        steps.add(StepName::Policies, Some(passed), message, detail);
        old
    }

    fn sent(&self, steps: &mut Steps, question: &Question, found: Option<&Remembered>) {
        if matches!(question.change, Which::MadeUp(_)) {
            return steps.add(StepName::Sent, None, "A made-up row is sent to nobody.", Value::Null);
        }
        let Some(found) = found else { return };
        let SubscriptionSpec { role, claims, .. } = &question.subscription;
        let connected = self.control.bus.state().borrow().connected;
        let at = |time: Timestamp| json!({"at": time.to_string()});
        let (passed, message, detail) = match found.fate {
            Fate::Sent(time) => (Some(true), format!("The bus received the change at {time}."), at(time)),
            Fate::OnTheWay if connected => (None, "It is on its way.".to_owned(), Value::Null),
            Fate::OnTheWay => {
                (None, "The bus is not connected: it is sent as soon as it is.".to_owned(), json!({"bus": "away"}))
            }
            Fate::Disabled(time) => {
                (Some(false), "Realtime was turned off for the table before it was sent.".to_owned(), at(time))
            }
            Fate::Lost(time, reason) => {
                let word = gaps::word(reason);
                let message = format!("It was not sent; a gap with the reason {word} was announced.");
                (Some(false), message, json!({"at": time.to_string(), "gap": word}))
            }
        };
        if let Some((_, why)) = found.unjudged.iter().find(|(who, _)| who.role == *role && who.claims == *claims) {
            let message = format!(
                "{message} Not for this subscription: when the row was judged, the policies could not be asked ({why}). \
                 A gap was announced to it."
            );
            return steps.add(StepName::Sent, Some(false), message, json!({"gap": why}));
        }
        // For whom it was is the other steps' matter.
        let passed = passed.filter(|passed| !(*passed && steps.failed().is_some()));
        let message = if steps.failed().is_some() { format!("{message} Not for this subscription.") } else { message };
        steps.add(StepName::Sent, passed, message, detail);
    }
}

fn registered<'a>(steps: &mut Steps, registry: &'a Registry, key: &TableKey) -> Option<&'a RegisteredTable> {
    let table = registry.enabled(key);
    let (passed, message, detail) = match table {
        Some(table) => {
            let (schema, name) = (&table.relation.schema, &table.relation.table);
            let detail = json!({"schema": key.schema, "table": key.table, "physical_schema": schema.as_str(),
                "physical_table": name.as_str(), "oid": table.oid});
            (true, format!("Realtime is on for {}.{}.", key.schema, key.table), detail)
        }
        None => {
            let message = format!("Realtime is not on for a table {}.{} of this project.", key.schema, key.table);
            (false, message, json!({"schema": key.schema, "table": key.table}))
        }
    };
    steps.add(StepName::Registered, Some(passed), message, detail);
    table.map(|table| &**table)
}

/// The row, if there is one to judge.
fn decoded(
    steps: &mut Steps,
    question: &Question,
    found: Option<&Remembered>,
    described: Option<&Described>,
) -> Option<Subject> {
    if let Which::MadeUp(made_up) = &question.change {
        let described = described?;
        let kind = made_up.kind;
        return match row::images(made_up, &described.table) {
            Ok((new, old)) => {
                steps.add(StepName::Decoded, Some(true), "The row is made up.", json!({"type": kind.as_str()}));
                Some(Subject { kind, new, old, xids: Vec::new() })
            }
            Err(message) => {
                steps.add(StepName::Decoded, Some(false), message, json!({"type": kind.as_str()}));
                None
            }
        };
    }
    let Some(found) = found else {
        let message = match question.change {
            Which::At(_) => {
                "No such change of this table is remembered: it is too long ago, it is still to come, or it was skipped."
            }
            Which::Row(_) => "No change of such a row is remembered.",
            _ => "No change of this table is remembered.",
        };
        steps.add(StepName::Decoded, None, message, Value::Null);
        return None;
    };
    let kind = found.kind.as_str();
    let Some(change) = &found.change else {
        let message = "The worker has read it; it was too large to be remembered with its row.";
        steps.add(StepName::Decoded, Some(true), message, json!({"type": kind}));
        return None;
    };
    let committed = Timestamp::from_microsecond(change.commit_time_us).unwrap_or_default().to_string();
    let unchanged: Vec<&str> = change
        .new
        .iter()
        .flat_map(|image| &image.0)
        .filter(|cell| cell.value == Cell::Unchanged)
        .map(|cell| &*cell.name)
        .collect();
    let image = change.new.as_ref().or(change.old.as_ref());
    let key = described.into_iter().flat_map(|described| &described.table.columns).filter(|column| column.primary_key);
    let key = key.filter_map(|column| match image?.get(&column.name)? {
        Cell::Text(text) => Some((column.name.to_string(), Value::from(&**text))),
        Cell::Null | Cell::Unchanged => None,
    });
    let key: Map<String, Value> = key.collect();
    let detail =
        json!({"type": kind, "committed_at": committed, "xid": change.xid, "key": key, "unchanged": unchanged});
    steps.add(StepName::Decoded, Some(true), format!("The worker has read the {kind}."), detail);
    Some(Subject::of(change))
}

fn binding(steps: &mut Steps, spec: &SubscriptionSpec, kind: Option<ChangeKind>, found: Option<&Remembered>) {
    let other = found
        .map(|found| &found.table.key)
        .filter(|key| key.schema != spec.schema || Some(&key.table) != spec.table.as_ref());
    let detail = json!({"event": spec.event.as_str(), "type": kind.map(ChangeKind::as_str)});
    let (passed, message) = match (other, kind) {
        (Some(key), _) => (Some(false), format!("The change is one of {}.{}.", key.schema, key.table)),
        (None, None) => (None, "The kind of change is not known.".to_owned()),
        (None, Some(kind)) if spec.event.wants(kind) => {
            (Some(true), format!("The subscription asks for {}.", spec.event.as_str()))
        }
        (None, Some(kind)) => {
            (Some(false), format!("The subscription asks for {}, this is {}.", spec.event.as_str(), kind.as_str()))
        }
    };
    steps.add(StepName::Binding, passed, message, detail);
}

fn grants(steps: &mut Steps, spec: &SubscriptionSpec, table: &RegisteredTable, described: &Described) {
    let access = &described.access;
    let known = admission::is_role(&spec.role, &table.project);
    let message = match access {
        _ if !known => format!("{:?} is not a role of this project.", spec.role),
        access if !access.schema_usage => "The role lacks USAGE on the schema.".to_owned(),
        access if !access.any() => "The role may SELECT no column of the table.".to_owned(),
        _ => "The role may read the table.".to_owned(),
    };
    let readable = names(described, |n| access.readable.get(n) == Some(&true));
    let detail = json!({"role": spec.role, "schema_usage": access.schema_usage, "readable": readable});
    steps.add(StepName::Grants, Some(known && access.any()), message, detail);
}

fn names(described: &Described, wanted: impl Fn(usize) -> bool) -> Vec<String> {
    let columns = described.table.columns.iter().enumerate();
    columns.filter(|(n, _)| wanted(*n)).map(|(_, column)| column.name.to_string()).collect()
}

/// Which columns are left, and what of the old row.
fn columns(
    steps: &mut Steps,
    spec: &SubscriptionSpec,
    described: &Described,
    active: Option<&ActiveSubscription>,
    row: Option<&Subject>,
    old_visible: Option<bool>,
) {
    let (table, access) = (&described.table, &described.access);
    let readable = |n: usize| access.readable.get(n) == Some(&true);
    let unknown = |name: &&String| table.column(name).is_none_or(|n| !readable(n));
    if let Some(column) = spec.select.iter().flatten().find(unknown) {
        let message = format!("A join with this selection is refused: invalid column for select {column}");
        return steps.add(StepName::Columns, Some(false), message, json!({"select": spec.select}));
    }
    let selected = |name: &str| spec.select.as_ref().is_none_or(|select| select.iter().any(|column| column == name));
    let kept = |n: usize| readable(n) && (table.columns[n].primary_key || selected(&table.columns[n].name));
    let removed = table.columns.iter().enumerate().filter(|(n, _)| !kept(*n)).map(|(n, column)| {
        json!({"name": &*column.name, "reason": if readable(n) { "not_selected" } else { "no_select_privilege" }})
    });
    let (visible, removed) = (names(described, kept), removed.collect::<Vec<_>>());
    let filtered = active.is_none_or(|active| {
        active.conditions.iter().all(|condition| table.column(condition.column()).is_some_and(readable))
    });
    let message = match removed.len() {
        _ if visible.is_empty() => "No column is left.".to_owned(),
        _ if !filtered => "The filter reads a column that the role may no longer read.".to_owned(),
        0 => "Every column is shown.".to_owned(),
        n => format!("{n} of {} columns are removed.", table.columns.len()),
    };
    let mut detail = json!({"visible": visible, "removed": removed});
    if let Some(row) = row.filter(|row| row.old.is_some()) {
        let whole = row.new.is_none() || old_visible == Some(true);
        detail["old_record"] = json!(if whole { "visible" } else { "key_only" });
    }
    let passed = filtered && !detail["visible"].as_array().is_none_or(Vec::is_empty);
    steps.add(StepName::Columns, Some(passed), message, detail);
}
