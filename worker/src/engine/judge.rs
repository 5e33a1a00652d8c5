//! From rows to messages: find the subscribers, ask PostgreSQL what they may see, encode what they see, hand it to the bus.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_bus::{BusError, Headers, Message, Subject};
use aura_domain::{ChangeKind, Position, ProjectId, SubId};
use aura_pgsource::{
    RoleAccess, SourceError, TableCatalog,
    visibility::{CheckOutcome, CheckRequest, Identity, Verdict},
};
use aura_store::{RegistrationStatus, Store};
use aura_wire::{ChangeEnvelope, GapEnvelope, GapReason};
use futures_util::future::join_all;
use jiff::Timestamp;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;

use super::{
    gaps::{Gaps, Loss},
    outage::Outages,
    placing::{Placed, Slice, TableBatch},
    registry::RegisteredTable,
    shard::Row,
    unjudged, verdict_log,
    vitals::Vitals,
};
use crate::{
    encode::{Encoder, OldRow, Projection},
    explain::{self, ExplainLog, Fate, Recent},
    subs::{control::Control, index::ActiveSubscription},
};

/// A list of ids is split beyond this (design §9).
const MAX_IDS: usize = 10_000;

/// Checks of one batch at once, a table each (R-SH-1): the rest of the connections are other projects'.
const PROJECT_INFLIGHT: usize = 4;

/// Times that a batch is matched anew since a column's type changed under it; then its subscriptions end.
const TYPE_TRIES: usize = 3;

/// What the whole engine shares.
pub(crate) struct Judge {
    /// Subscriptions, the registry, and what a message is signed with.
    pub(crate) control: Arc<Control>,
    pub(crate) store: Store,
    pub(crate) vitals: Arc<Vitals>,
    /// Read while a batch is published; written, for a moment, before a disable is reported as applied (R-REG-8).
    pub(crate) disabling: Arc<tokio::sync::RwLock<()>>,
    /// R-BIG-4: `min(max_event_bytes, max_payload)` less room for the envelope.
    pub(crate) max_event_bytes: usize,
    pub(crate) outages: Arc<Outages>,
    pub(super) gaps: Arc<Gaps>,
    /// What became of the rows, should somebody ask.
    pub(super) recent: Arc<Recent>,
    pub(super) explain_log: ExplainLog,
    /// Highest `seq` that each project's messages have used, received or not.
    pub(crate) issued: Mutex<HashMap<ProjectId, u64>>,
}

/// What a project keeps from batch to batch.
pub(crate) struct Lane {
    project: ProjectId,
    seq: u64,
    encoders: HashMap<u32, Encoder>,
    /// The row that is being encoded, should that panic (R-SD-6).
    at: Option<Position>,
    /// Registrations that were found missing, with the OID that they had then.
    missing: HashSet<(uuid::Uuid, u32)>,
}

impl Lane {
    /// See the field.
    pub(crate) fn at(&self) -> Option<Position> {
        self.at
    }
}

/// A check's outcome, about the table that was registered.
struct Judged<'a> {
    table: &'a Arc<TableCatalog>,
    outcome: &'a CheckOutcome,
}

impl Judge {
    /// A lane that goes on counting where the project's last one stopped: fronts drop a number that they have seen.
    pub(crate) fn lane(&self, project: ProjectId) -> Lane {
        let seq = self.issued.lock().unwrap_or_else(PoisonError::into_inner).get(&project).copied().unwrap_or(0);
        Lane { project, seq, encoders: HashMap::new(), at: None, missing: HashSet::new() }
    }

    /// Judges and publishes a batch; returns when the bus has received all of it, or what it could not be given was
    /// announced as a gap; answers how many rows that were. Retries for as long as the source or the bus is away; the
    /// caller cancels. A `hot` shard doesn't look ahead: one table after the other (R-SH-2).
    pub(crate) async fn deliver(&self, lane: &mut Lane, rows: &[Row], hot: bool) -> usize {
        self.recent.begin(rows);
        let (mut rest, mut skipped, mut tries) = (rows, 0, 0);
        while !rest.is_empty() {
            let (batches, placed) = self.place(rest).await;
            let (now, later) = rest.split_at(placed.len());
            let outcomes = self.check_all(&batches, hot).await;
            tries += 1;
            // A column has another type than the filters on it were compiled for: nothing is matched by those.
            if self.follow_types(&batches, &outcomes, now, tries >= TYPE_TRIES).await {
                continue;
            }
            skipped += self.deliver_placed(lane, now, (&batches, &placed), &outcomes).await;
            (rest, tries) = (later, 0);
        }
        skipped
    }

    async fn deliver_placed(
        &self,
        lane: &mut Lane,
        rows: &[Row],
        (batches, placed): (&[TableBatch<'_>], &[Placed]),
        outcomes: &[CheckOutcome],
    ) -> usize {
        // Held until the bus has the rows: a PUT false is answered only after it.
        let publishing = self.disabling.read().await;
        let registry = Arc::clone(&self.control.registry.borrow());
        let mut slice = Slice::new(&rows[0]);
        for (batch, outcome) in batches.iter().zip(outcomes) {
            self.note_gaps(batch, outcome, rows, placed, &mut slice.messages);
        }
        let (mut skipped, mut refused) = (0, Vec::new());
        for (row, placed) in rows.iter().zip(placed) {
            lane.at = Some(row.body.change.position);
            let outcome = &outcomes[placed.batch];
            if !registry.still_admits(&row.body.table, row.body.change.position.commit) {
                metrics::counter!("cdc_skipped_rows_total", "reason" => "disabled").increment(1);
                self.ended(row, Fate::Disabled(Timestamp::now()));
                continue;
            }
            let table = outcome.table.as_ref().filter(|_| outcome.oid_matches);
            let table = table.filter(|table| row.body.table.holds(&row.body.change.relation, table));
            if self.explain_log.wants(lane.project) {
                verdict_log::write(&self.control, row, placed, table.map(|table| &**table), outcome);
            }
            let Some(table) = table else {
                skipped += 1;
                self.ended(row, Fate::Lost(Timestamp::now(), GapReason::TableChanged));
                continue;
            };
            self.row_messages(lane, row, placed, &Judged { table, outcome }, &mut slice.messages);
            slice.took(row);
            if slice.is_full() {
                lane.at = None;
                let full = std::mem::replace(&mut slice, Slice::new(row));
                self.send(lane, full, &mut refused).await;
            }
        }
        lane.at = None;
        self.send(lane, slice, &mut refused).await;
        let seen = batches.iter().zip(outcomes).filter(|(_, outcome)| outcome.oid_matches);
        self.vitals.published(seen.map(|(batch, _)| batch.table.registration));
        // Not for longer: what follows may wait for the bus or a database, and who waits to write lets no reader in.
        drop(publishing);
        for (range, rows) in refused {
            skipped += rows;
            self.gaps.announce(Loss { range, ..Loss::up_to_now(lane.project, GapReason::Bus, None) }).await;
        }
        for (batch, _) in batches.iter().zip(outcomes).filter(|(_, outcome)| !outcome.oid_matches) {
            self.note_missing(lane, batch.table).await;
        }
        self.control.seqs.lock().unwrap_or_else(PoisonError::into_inner).insert(lane.project, lane.seq);
        skipped
    }

    /// Publishes a slice; what the bus refuses is to be announced.
    async fn send(&self, lane: &Lane, slice: Slice, refused: &mut Vec<(Option<(Position, Position)>, usize)>) {
        self.issued.lock().unwrap_or_else(PoisonError::into_inner).insert(lane.project, lane.seq);
        let received = slice.messages.is_empty() || self.publish(&slice.messages).await;
        let now = Timestamp::now();
        let fate = if received { Fate::Sent(now) } else { Fate::Lost(now, GapReason::Bus) };
        self.recent.end(lane.project, slice.range, fate);
        if !received {
            refused.push((slice.range, slice.rows));
        }
    }

    fn ended(&self, row: &Row, fate: Fate) {
        let position = row.body.change.position;
        self.recent.end(row.body.table.project.id, Some((position, position)), fate);
    }

    /// R-SH-3: tells the project's subscribers that they miss these rows; returns when the bus has received it.
    pub(crate) async fn skip(&self, project: ProjectId, rows: &[Row]) {
        let place = |row: &Row| row.body.change.position;
        let range = rows.first().map(place).zip(rows.last().map(place));
        let Some((from, to)) = range else { return };
        metrics::counter!("cdc_skipped_rows_total", "reason" => "skipped").increment(rows.len() as u64);
        tracing::error!(source = %self.control.source, %project, rows = rows.len(), %from, %to,
            "a project held everybody up, its rows are skipped");
        self.recent.begin(rows);
        self.gaps.announce(Loss { range, ..Loss::up_to_now(project, GapReason::Skipped, None) }).await;
        self.recent.end(project, range, Fate::Lost(Timestamp::now(), GapReason::Skipped));
    }

    async fn check_all(&self, batches: &[TableBatch<'_>], hot: bool) -> Vec<CheckOutcome> {
        let permits = Semaphore::new(if hot { 1 } else { PROJECT_INFLIGHT });
        let checks = batches.iter().map(|batch| async {
            let _permit = permits.acquire().await;
            self.check(batch).await
        });
        join_all(checks).await
    }

    /// Repeats while the source can't be reached or has no connection free: neither is a verdict (R-SH-4).
    async fn check(&self, batch: &TableBatch<'_>) -> CheckOutcome {
        let project = &batch.table.project;
        let identities: Vec<Identity> = batch.identities.iter().map(|identity| (**identity).clone()).collect();
        let mut pause = Duration::from_millis(50);
        loop {
            let request = CheckRequest {
                project: project.id,
                password: &project.visibility_password,
                extra_roles: &project.extra_roles,
                relation: &batch.table.relation,
                registered_oid: batch.table.oid,
                xids: &batch.xids,
                images: &batch.images,
                identities: &identities,
                wanted: Some(&batch.wanted),
            };
            match self.control.visibility.check(request).await {
                Ok(mut outcome) => {
                    self.outages.source(false);
                    unjudged::count(&outcome);
                    if project.require_rls && outcome.oid_matches && !outcome.row_security {
                        unjudged::withhold(&mut outcome);
                    }
                    return outcome;
                }
                Err(error) => self.wait_out(&error, &mut pause).await,
            }
        }
    }

    pub(super) async fn wait_out(&self, error: &SourceError, pause: &mut Duration) {
        tracing::warn!(source = %self.control.source, %error, "visibility can't be judged now, retrying");
        // That no connection is free is no outage.
        if !matches!(error, SourceError::Busy { .. }) {
            metrics::counter!("cdc_visibility_outages_total").increment(1);
        }
        if error.is_unreachable() {
            self.outages.source(true);
        }
        tokio::time::sleep(*pause).await;
        *pause = (*pause * 2).min(Duration::from_secs(5));
    }

    /// Tells the subscribers concerned of what nobody could judge (R-RLS-4, R-RLS-6), and all of a table that isn't the one that
    /// was registered (R-RLS-10).
    fn note_gaps(
        &self,
        batch: &TableBatch<'_>,
        outcome: &CheckOutcome,
        rows: &[Row],
        placed: &[Placed],
        messages: &mut Vec<Message>,
    ) {
        let concerned = |placed: &&(&Row, &Placed)| Arc::ptr_eq(&placed.0.body.table, batch.table);
        let mine: Vec<_> = rows.iter().zip(placed).collect();
        let mine = mine.iter().filter(concerned);
        let table = [batch.table.key.schema.clone(), batch.table.key.table.clone()];
        if !outcome.oid_matches {
            let positions: Vec<_> = mine.map(|(row, _)| row.body.change.position).collect();
            messages.push(self.not_the_registered(batch, &positions));
            return;
        }
        let foreign = |(row, _): &&(&Row, &Placed)| {
            let here = |catalog: &Arc<TableCatalog>| row.body.table.holds(&row.body.change.relation, catalog);
            !outcome.table.as_ref().is_some_and(here)
        };
        let positions: Vec<_> = mine.clone().filter(foreign).map(|(row, _)| row.body.change.position).collect();
        if !positions.is_empty() {
            messages.push(self.not_the_registered(batch, &positions));
        }
        if outcome.verdicts.iter().any(|verdict| matches!(verdict, Verdict::Error(_))) {
            self.remember_unjudged(mine.clone().copied(), outcome);
        }
        for (reason, found) in unjudged::by_reason(mine.copied(), outcome).into_values() {
            let (table, ids) = (Some(table.clone()), Some(found.sub_ids));
            messages.push(self.gap(batch.table.project.id, &found.positions, reason, table, ids));
        }
    }

    /// R-RLS-10: what stands under a row's name isn't the registered table, or no partition of it.
    fn not_the_registered(&self, batch: &TableBatch<'_>, positions: &[Position]) -> Message {
        let key = &batch.table.key;
        metrics::counter!("cdc_skipped_rows_total", "reason" => "oid").increment(positions.len() as u64);
        tracing::warn!(source = %self.control.source, table = %batch.table.relation.table, rows = positions.len(),
            "the table under this name isn't the registered one, rows dropped");
        let table = Some([key.schema.clone(), key.table.clone()]);
        self.gap(key.project, positions, GapReason::TableChanged, table, None)
    }

    /// For explanations.
    fn remember_unjudged<'r>(&self, rows: impl Iterator<Item = (&'r Row, &'r Placed)>, outcome: &CheckOutcome) {
        for (row, placed) in rows {
            let who = placed.subscribers.iter().filter_map(|(sub, n)| match &outcome.verdicts[*n] {
                Verdict::Error(kind) => Some((Arc::clone(&sub.identity), explain::error(kind).0)),
                Verdict::Decided { .. } => None,
            });
            self.recent.unjudged(row.body.table.project.id, row.body.change.position, who);
        }
    }

    /// R-REG-2: what stands under the name (or nothing) isn't the registered table. Told to the platform database once.
    async fn note_missing(&self, lane: &mut Lane, table: &RegisteredTable) {
        if lane.missing.contains(&(table.registration, table.oid)) {
            return;
        }
        let (status, reason) = (RegistrationStatus::Missing, Some("the registered table is gone"));
        let which = (table.registration, table.oid, &table.relation.table);
        match self.store.mark_status(self.control.source, self.control.epoch, which, status, reason).await {
            Ok(()) => drop(lane.missing.insert((table.registration, table.oid))),
            Err(error) => tracing::warn!(source = %self.control.source, %error, "missing table not noted"),
        }
    }

    pub(super) fn gap(
        &self,
        project: ProjectId,
        positions: &[Position],
        reason: GapReason,
        table: Option<[String; 2]>,
        sub_ids: Option<Vec<SubId>>,
    ) -> Message {
        let gap = GapEnvelope {
            v: 1,
            project,
            source: self.control.source,
            from: positions.first().copied(),
            to: positions.last().copied(),
            reason,
            tables: table.map(|table| vec![table]),
            sub_ids,
        };
        self.message(Subject::gap(project), gap.encode())
    }

    fn row_messages(
        &self,
        lane: &mut Lane,
        row: &Row,
        placed: &Placed,
        judged: &Judged<'_>,
        messages: &mut Vec<Message>,
    ) {
        if row.body.change.kind == ChangeKind::Truncate {
            return;
        }
        let mut audiences: BTreeMap<Projection, Vec<SubId>> = BTreeMap::new();
        for (sub, n) in &placed.subscribers {
            if let Some(projection) = projection(sub, &judged.outcome.verdicts[*n], placed, judged.table) {
                let id = if judged.outcome.row_security { sub.sub_id } else { sub.twin };
                audiences.entry(projection).or_default().push(id);
            }
        }
        if audiences.is_empty() {
            // Every change reaches the bus (G1), this one for nobody.
            let columns = (0..judged.table.columns.len()).collect();
            audiences.insert(Projection { columns, old_row: OldRow::Whole }, Vec::new());
        }
        let Lane { seq, encoders, .. } = lane;
        let encoder = encoder(encoders, row, judged.table);
        for (m, (projection, mut ids)) in (0..).zip(audiences) {
            ids.sort_unstable();
            ids.dedup();
            let data = encoder.encode(&row.body.change, &projection, self.max_event_bytes);
            self.parts(seq, row, m, &ids, &data, messages);
        }
    }

    /// One message, or several with parts of a long list.
    fn parts(&self, seq: &mut u64, row: &Row, m: u32, ids: &[SubId], data: &RawValue, messages: &mut Vec<Message>) {
        // 20 digits and a comma an id; the envelope's own fields fit in the room that max_event_bytes leaves.
        let room =
            (self.control.bus.max_payload().saturating_sub((16 << 10) + data.get().len()) / 21).clamp(100, MAX_IDS);
        let chunks: Vec<&[SubId]> = if ids.is_empty() { vec![&[]] } else { ids.chunks(room).collect() };
        let key = &row.body.table.key;
        let subject = Subject::changes(key.project, &key.schema, &key.table);
        let parts = u32::try_from(chunks.len()).expect("fewer parts than ids");
        for (part, ids) in (0..).zip(chunks) {
            *seq += 1;
            let envelope = ChangeEnvelope {
                v: 1,
                project: key.project,
                source: self.control.source,
                seq: *seq,
                position: row.body.change.position,
                m,
                kind: row.body.change.kind.as_str(),
                schema: &key.schema,
                table: &key.table,
                allowed_sub_ids: ids,
                part: (parts > 1).then_some([part, parts]),
                data,
            };
            messages.push(self.message(subject.clone(), envelope.encode()));
        }
    }

    fn message(&self, subject: Subject, payload: bytes::Bytes) -> Message {
        let headers = Headers {
            origin: Some(self.control.origin.clone()),
            source: Some(self.control.source),
            epoch: Some(self.control.epoch),
        };
        Message { subject, payload, headers, reply: None }
    }

    /// Publishes until the bus has proved receipt (R-ACK-1, R-ACK-3); each message keeps its seq. False = the bus refuses
    /// the batch again and again: sending the same once more won't help, and one batch must not hold the slot for ever.
    pub(super) async fn publish(&self, messages: &[Message]) -> bool {
        let mut pause = Duration::from_millis(20);
        let mut refusals = 0;
        let mut failed = false;
        loop {
            self.control.await_fronts(failed).await;
            if self.vitals.is_cut() {
                // The run is over, and this task with it as soon as it yields.
                std::future::pending::<()>().await;
            }
            match self.control.bus.publish_batch(messages).await {
                Ok(()) => return true,
                Err(BusError::Refused(reason)) if refusals >= 3 => {
                    tracing::error!(source = %self.control.source, %reason, messages = messages.len(), "the bus refuses a batch, dropped");
                    metrics::counter!("cdc_skipped_rows_total", "reason" => "refused").increment(messages.len() as u64);
                    return false;
                }
                Err(error) => {
                    let refused = matches!(error, BusError::Refused(_));
                    // Whoever waits for the fronts holds up everybody's batches: not for a refusal.
                    failed = !refused;
                    refusals += u32::from(refused);
                    tracing::warn!(source = %self.control.source, %error, "batch not proved to be received, publishing it again");
                    metrics::counter!("cdc_publish_retries_total").increment(1);
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_secs(1));
                }
            }
        }
    }
}

fn encoder<'e>(encoders: &'e mut HashMap<u32, Encoder>, row: &Row, table: &Arc<TableCatalog>) -> &'e mut Encoder {
    let fresh = || Encoder::new(Arc::clone(table), &row.body.table.key.schema, &row.body.table.key.table);
    let encoder = encoders.entry(row.body.table.oid).or_insert_with(fresh);
    if !Arc::ptr_eq(encoder.catalog(), table) {
        *encoder = fresh();
    }
    encoder
}

/// What the subscriber sees of the row; `None` = nothing. Only a positive verdict shows anything.
pub(super) fn projection(
    sub: &ActiveSubscription,
    verdict: &Verdict,
    placed: &Placed,
    table: &TableCatalog,
) -> Option<Projection> {
    let Verdict::Decided { access, visible } = verdict else { return None };
    let sees = |image: Option<usize>| image.is_some_and(|n| visible.get(n).copied().unwrap_or(false));
    let decides = placed.new.or(placed.old);
    if !sees(decides) {
        return None;
    }
    let columns = visible_columns(sub, access, table);
    // A filter on a column that the role may no longer read would tell its values (R-RLS-3).
    let filtered = sub.conditions.iter().all(|condition| readable(access, table, condition.column()));
    if columns.is_empty() || !filtered {
        return None;
    }
    let old_row = if placed.new.is_some() && !sees(placed.old) { OldRow::KeyOfNew } else { OldRow::Whole };
    Some(Projection { columns, old_row })
}

fn readable(access: &RoleAccess, table: &TableCatalog, column: &str) -> bool {
    table.column(column).is_some_and(|n| access.readable.get(n) == Some(&true))
}

/// Readable columns ∩ `select`; key columns always stay (supabase-wire.md §3.1).
fn visible_columns(sub: &ActiveSubscription, access: &RoleAccess, table: &TableCatalog) -> Vec<usize> {
    let selected = |name: &str| sub.select.as_ref().is_none_or(|select| select.iter().any(|column| column == name));
    let columns = table.columns.iter().enumerate();
    columns
        .filter(|(n, column)| {
            access.readable.get(*n).copied().unwrap_or(false) && (column.primary_key || selected(&column.name))
        })
        .map(|(n, _)| n)
        .collect()
}
