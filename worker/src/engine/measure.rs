//! What flow control shows (F.12): gauges and counters, and the engine's entry on the board.

use std::time::{Duration, Instant};

use aura_domain::{Condition, Culprit, Lsn, SourceId};
use aura_flow::{FeedbackKind, Outage, Reader};

use super::{Engine, intake::Intake, shard::ShardQueue};

/// Shown this often, and with every status and pause.
pub(super) const PERIOD: Duration = Duration::from_secs(1);
/// Work that stands still for so long is a condition; at `stall_limit` it ends the engine.
const STALLED: Duration = Duration::from_secs(30);

/// Holes, as the stream knows them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Holes {
    pub(super) count: usize,
    pub(super) since: Option<Instant>,
}

/// What was added to counters so far: the machines count from their own beginning, the counters from the process's.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    waits: u64,
    paused: Duration,
    by_tick: u64,
    advances: u64,
    withheld: u64,
}

/// Why reading is paused: what is away, or that rows come faster than they go.
pub(super) fn pause_reason(outage: Outage) -> &'static str {
    match outage {
        Outage { bus: true, .. } => "bus",
        Outage { source: true, .. } => "source",
        Outage { .. } => "quota",
    }
}

/// A status was sent.
pub(super) fn status(source: SourceId, kind: FeedbackKind, gap: Option<Duration>) {
    let source = source.to_string();
    metrics::counter!("cdc_feedback_total", "source" => source.clone(), "kind" => kind.as_str()).increment(1);
    if let Some(gap) = gap {
        metrics::histogram!("cdc_feedback_gap_seconds", "source" => source).record(gap.as_secs_f64());
    }
}

/// Reading has paused.
pub(super) fn paused(source: SourceId, outage: Outage) {
    let labels = [("source", source.to_string()), ("reason", pause_reason(outage).to_owned())];
    metrics::counter!("cdc_flow_pause_total", &labels).increment(1);
}

/// Shows everything.
pub(super) fn show(engine: &Engine, intake: &mut Intake, holes: Holes) {
    let now = Instant::now();
    let source = engine.source.id;
    count(source, intake, now);
    for (number, shard) in intake.shards().iter().enumerate() {
        show_shard(source, number, shard);
    }
    let reader = &intake.reader;
    let culprit = reader.culprit(now).map(|culprit| Culprit {
        shard: culprit.owner.shard,
        project: culprit.owner.project,
        lsn: culprit.lsn,
        seconds: culprit.age.as_secs_f64(),
    });
    let (still, outage) = reader.stalled_for(now);
    let stalled = still >= STALLED && !outage.any();
    let detail = stalled.then(|| format!("nothing acknowledged for {} s", still.as_secs()));
    engine.conditions.put(Condition::Stalled, stalled, detail);
    gauges(source, reader, culprit.as_ref(), holes, now);
    engine.deps.board.update(source, &engine.source.name, |status| {
        let live = &mut status.live;
        live.received_lsn = reader.received();
        live.resolved_lsn = reader.resolved();
        live.confirmed_lsn = reader.flushed();
        live.holes = holes.count;
        let (flow, quota) = (&mut live.flow, reader.quota());
        (flow.used_bytes, flow.quota_bytes) = (quota.used() as u64, quota.limit() as u64);
        let paused = quota.paused_since().is_some();
        flow.paused_since = paused.then(|| flow.paused_since.take().unwrap_or_else(crate::status::now));
        flow.pause_reason = paused.then(|| pause_reason(outage).to_owned());
        flow.pauses = quota.counts().pauses;
        flow.culprit = culprit;
        status.measure(source);
    });
}

fn gauges(source: SourceId, reader: &Reader, culprit: Option<&Culprit>, holes: Holes, now: Instant) {
    let quota = reader.quota();
    let lag = reader.received().0.saturating_sub(reader.resolved().max(Lsn::ZERO).0);
    let hole_age = holes.since.map_or(0.0, |since| now.saturating_duration_since(since).as_secs_f64());
    let values = [
        ("cdc_flow_quota_bytes", quota.limit() as f64),
        ("cdc_flow_overdraft_bytes", quota.overdraft() as f64),
        ("cdc_resolved_lag_bytes", lag as f64),
        ("cdc_resolved_oldest_seconds", culprit.map_or(0.0, |culprit| culprit.seconds)),
        ("cdc_txn_open_rows", reader.open_rows() as f64),
        ("cdc_hole_oldest_seconds", hole_age),
    ];
    for (name, value) in values {
        metrics::gauge!(name, "source" => source.to_string()).set(value);
    }
}

fn show_shard(source: SourceId, number: usize, shard: &ShardQueue) {
    let gauges = shard.gauges();
    let values = [
        ("cdc_shard_bytes", gauges.bytes as f64),
        ("cdc_shard_rows", gauges.rows as f64),
        ("cdc_shard_oldest_seconds", gauges.oldest.as_secs_f64()),
        ("cdc_shard_hot", f64::from(u8::from(gauges.hot))),
    ];
    for (name, value) in values {
        metrics::gauge!(name, "source" => source.to_string(), "shard" => number.to_string()).set(value);
    }
}

fn count(source: SourceId, intake: &mut Intake, now: Instant) {
    let quota = intake.reader.quota();
    let counts = quota.counts();
    let present = quota.paused_since().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
    let paused = counts.paused + present;
    let (advances, withheld) = (intake.reader.advances(), intake.reader.withheld());
    let before = std::mem::replace(
        &mut intake.counted,
        // Whole seconds; what is left of one is counted with the next.
        Counted {
            waits: counts.waits,
            paused: Duration::from_secs(paused.as_secs()),
            by_tick: counts.resume_by_tick,
            advances,
            withheld,
        },
    );
    let added = [
        ("cdc_flow_paused_seconds_total", paused.as_secs().saturating_sub(before.paused.as_secs())),
        ("cdc_flow_resume_by_tick_total", counts.resume_by_tick.saturating_sub(before.by_tick)),
        ("cdc_resolved_advance_total", advances.saturating_sub(before.advances)),
        ("cdc_feedback_withheld_total", withheld.saturating_sub(before.withheld)),
    ];
    for (name, more) in added {
        metrics::counter!(name, "source" => source.to_string()).increment(more);
    }
    let labels = [("source", source.to_string()), ("reason", "row".to_owned())];
    metrics::counter!("cdc_flow_pause_total", &labels).increment(counts.waits.saturating_sub(before.waits));
}

/// What is registered was read from the platform database, beside the stream.
pub(super) fn loaded(source: SourceId, took: Duration) {
    metrics::gauge!("cdc_registry_load_seconds", "source" => source.to_string()).set(took.as_secs_f64());
}

/// A filter was made of it, and the stream waited.
pub(super) fn rebuilt(source: SourceId, took: Duration) {
    metrics::gauge!("cdc_filter_rebuild_seconds", "source" => source.to_string()).set(took.as_secs_f64());
}
