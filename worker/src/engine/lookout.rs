//! Looks at the slot on a connection of its own, whatever the stream does: how much log the server still keeps (R-FB-6),
//! who holds the slot without doing any work (R-ENG-7), and whether the server still knows our stream.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use aura_domain::{Condition, EngineState, Lsn};
use aura_pgsource::{
    SourceError, SqlConnection, connect_sql,
    ladder::zombie_reason,
    slot::{self, SlotHolder, SlotStatus},
};

use super::{
    Engine,
    session::CONNECT,
    zombie::{self, Look, Looks, Rule},
};
use crate::states::Observed;

/// R-ENG-7, R-FB-6.
const PERIOD: Duration = Duration::from_secs(10);
/// While reading is paused: what the server says of the stream then lies behind rows that nobody reads, and the log that it
/// may not keep grows. A slot that it throws away must be made again within 10 s (R-ENG-8).
const PERIOD_PAUSED: Duration = Duration::from_secs(2);
/// Below this share of `max_slot_wal_keep_size` the slot is at risk (R-FB-6).
const AT_RISK: f64 = 0.25;

/// See the module; one per run.
pub(super) struct Lookout {
    engine: Arc<Engine>,
    sql: Option<SqlConnection>,
    looks: Looks,
    /// Rows that were read at the last look, and the end of the last transaction that was read.
    read: (u64, Lsn),
    /// The stream that the server didn't know at the last look.
    unknown: Option<Instant>,
}

impl Lookout {
    pub(super) fn new(engine: Arc<Engine>) -> Self {
        Self { engine, sql: None, looks: Looks::default(), read: (0, Lsn::ZERO), unknown: None }
    }

    /// Runs until the engine ends.
    pub(super) async fn run(mut self) {
        let halt = self.engine.halt.clone();
        let looking = async {
            let mut looked = Instant::now();
            loop {
                if std::mem::replace(&mut looked, Instant::now()).elapsed() > PERIOD * 2 {
                    // This process slept, or couldn't look: what was seen before is no beginning of anything.
                    self.looks.forget();
                    self.unknown = None;
                }
                if let Err(error) = self.look().await {
                    tracing::debug!(source = %self.engine.source.id, %error, "can't look at the slot");
                    self.sql = None;
                }
                tokio::select! {
                    () = self.due() => {}
                    () = self.engine.look.notified() => {}
                }
            }
        };
        halt.run_until_cancelled(looking).await;
    }

    /// Waits until it is time for another look; a pause may begin meanwhile.
    async fn due(&self) {
        let last = Instant::now();
        loop {
            tokio::time::sleep(PERIOD_PAUSED).await;
            if last.elapsed() >= PERIOD || self.engine.is_paused() {
                return;
            }
        }
    }

    async fn look(&mut self) -> Result<(), SourceError> {
        let engine = Arc::clone(&self.engine);
        let sql = match self.sql.take().filter(|sql| !sql.is_closed()) {
            Some(sql) => sql,
            None => connect_sql(&engine.url, &engine.application_name(), Some(&engine.sockets), CONNECT).await?,
        };
        let status = slot::status(&sql, &engine.source.slot_name).await?;
        let limit = slot::keep_size(&sql).await?;
        self.guard(status.as_ref(), limit);
        self.compare(status.as_ref());
        match status.as_ref().and_then(|status| status.holder.as_ref().map(|holder| (status, holder))) {
            Some((status, holder)) => self.judge(&sql, status, holder).await?,
            None => self.looks.forget(),
        }
        self.sql = Some(sql);
        Ok(())
    }

    /// R-FB-6: how long the server can still wait for us.
    fn guard(&self, status: Option<&SlotStatus>, limit: Option<u64>) {
        let engine = &self.engine;
        let live = status.map(SlotStatus::live).unwrap_or_default();
        if let Some(status) = status {
            engine.vitals.note_server_end(status.wal_end);
        }
        if let Some(bytes) = live.safe_wal_bytes {
            metrics::gauge!("cdc_slot_safe_wal_bytes", "source" => engine.source.id.to_string()).set(bytes as f64);
        }
        let line = limit.map(|limit| limit as f64 * AT_RISK);
        let short = live.safe_wal_bytes.zip(line).is_some_and(|(safe, line)| (safe as f64) < line);
        let at_risk = short || live.wal_status.as_deref() == Some("unreserved");
        let detail = live.safe_wal_bytes.map(|bytes| format!("{bytes} bytes until it may be lost"));
        if at_risk && !engine.at_risk.send_replace(at_risk) {
            tracing::error!(source = %engine.source.id, detail, "the slot is at risk, the slowest projects are skipped");
        }
        engine.at_risk.send_replace(at_risk);
        engine.conditions.put(Condition::SlotAtRisk, at_risk, detail);
        if status.is_some_and(SlotStatus::is_lost) {
            // Whoever waits for the server needn't.
            engine.new_slot.notify_one();
        }
        engine.deps.board.update(engine.source.id, &engine.source.name, |status| status.live.slot = live);
    }

    /// A half-open connection: the server has ended our stream, and its last word never came. Silence alone proves
    /// nothing, a large transaction is decoded without a word. Two looks, since a session may just begin or end.
    fn compare(&mut self, status: Option<&SlotStatus>) {
        let engine = &self.engine;
        let ours = |holder: &SlotHolder| {
            let name = &holder.application_name;
            name.is_empty() || slot::epoch_of(name, engine.source.id) == Some(engine.epoch)
        };
        let known = status.and_then(|status| status.holder.as_ref()).is_some_and(ours);
        let stream = engine.stream.borrow().filter(|_| !known);
        if stream.is_some() && stream == self.unknown {
            tracing::error!(source = %engine.source.id, "the server doesn't know our stream any more, which looks alive");
            engine.cut.send_replace(stream);
        }
        self.unknown = stream;
    }

    /// R-ENG-7. An older epoch of ours is ended when a session begins, and another one can't stream before that.
    async fn judge(
        &mut self,
        sql: &SqlConnection,
        status: &SlotStatus,
        holder: &SlotHolder,
    ) -> Result<(), SourceError> {
        let Some(sender) = slot::sender(sql, holder.pid).await? else { return Ok(()) };
        let ours = slot::epoch_of(&holder.application_name, self.engine.source.id) == Some(self.engine.epoch);
        let large = self.reads_one_transaction();
        let whose = zombie::Holder { ours, excused: ours && (large || self.engine.is_excused()) };
        let patience = self.engine.deps.settings.zombie_after;
        if let Some(rule) = self.looks.look(Look::new(status, &sender), Instant::now(), whose, patience) {
            self.found(rule, holder, ours);
        }
        Ok(())
    }

    /// B1: rows came since the last look, all of one transaction, so there is nothing to confirm yet.
    fn reads_one_transaction(&mut self) -> bool {
        let vitals = &self.engine.vitals;
        let now = (vitals.rows().admitted, vitals.boundary());
        let before = std::mem::replace(&mut self.read, now);
        now.0 > before.0 && now.1 == before.1
    }

    fn found(&self, rule: Rule, holder: &SlotHolder, ours: bool) {
        let engine = &self.engine;
        let reason = zombie_reason(&engine.source.slot_name, holder);
        tracing::error!(source = %engine.source.id, rule = rule.as_str(), ours, %reason, "a zombie holds the slot");
        metrics::counter!("cdc_zombies_found_total", "rule" => rule.as_str()).increment(1);
        if ours {
            engine.conditions.set(Condition::Stalled, Some(format!("{}: {reason}", rule.as_str())));
            engine.sockets.shutdown_all();
            engine.hung.cancel();
        } else {
            let code = Some("slot_in_use_by_other");
            engine.observe(Observed { state: EngineState::Zombie, code, detail: Some(reason) });
        }
    }
}

impl Engine {
    /// Says itself why nothing moves.
    fn is_excused(&self) -> bool {
        self.is_paused() || self.outages.now().any()
    }

    /// As it said at most a second ago.
    fn is_paused(&self) -> bool {
        self.deps.board.one(self.source.id).is_some_and(|status| status.live.flow.paused_since.is_some())
    }
}
