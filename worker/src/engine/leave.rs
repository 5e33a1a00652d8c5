//! The end of a session that was asked to stop: drain, confirm, see it confirmed, close.

use std::time::{Duration, Instant};

use aura_domain::{EngineState, Generation};
use aura_pgsource::slot;

use super::{
    error::EngineError,
    intake::Intake,
    session::{Session, Stream},
};

/// Limit of reading the final position back (F.9).
const VERIFY: Duration = Duration::from_millis(1500);
/// Reserved for the final position and for leaving, inside the drain time-out (F.9).
const FINAL_RESERVE: Duration = Duration::from_secs(3);

impl Session<'_> {
    async fn save_position(&self, stream: &Stream) -> Result<(), EngineError> {
        let generation = self.generation.unwrap_or(Generation(1));
        let (store, source) = (&self.engine.deps.store, self.engine.source.id);
        store.save_position(source, self.engine.epoch, generation, stream.feedback.flushed()).await?;
        Ok(())
    }

    /// Drains what is out, confirms, verifies by SQL and closes (F.9).
    pub(super) async fn leave(&self, mut stream: Stream, intake: &mut Intake) {
        let engine = self.engine;
        engine.set_status(EngineState::Draining, None);
        let budget = engine.deps.settings.drain_timeout;
        let deadline = Instant::now() + budget.saturating_sub(FINAL_RESERVE).max(budget / 2);
        intake.flush();
        loop {
            let resolved = intake.tracker.resolve();
            if intake.tracker.is_settled() || Instant::now() >= deadline {
                break;
            }
            if stream.feedback.is_due(resolved, Instant::now()).is_some()
                && self.send_status(&mut stream, intake, false).await.is_err()
            {
                return;
            }
            let due = stream.feedback.due(resolved, Instant::now()).min(deadline);
            tokio::select! {
                () = intake.acked.notified() => {}
                () = tokio::time::sleep_until(due.into()) => {}
            }
        }
        let verified = matches!(self.verify(&mut stream, intake).await, Ok(true));
        let final_lsn = stream.feedback.flushed();
        let _ = self.save_position(&stream).await;
        self.close(stream, intake).await;
        tracing::info!(source = %engine.source.id, lsn = %final_lsn, verified,
            settled = intake.tracker.is_settled(), admitted = intake.admitted, skipped = intake.skipped, "engine drained");
    }

    /// Sends the final position and reads it back: a close with unread bytes in the socket would throw the status away
    /// (E4), so reading goes on, into nothing.
    async fn verify(&self, stream: &mut Stream, intake: &mut Intake) -> Result<bool, EngineError> {
        self.send_status(stream, intake, false).await?;
        let wanted = stream.feedback.flushed();
        let confirmed = slot::wait_confirmed(&stream.sql, &self.engine.source.slot_name, wanted, VERIFY);
        let discard = async {
            loop {
                if let Err(error) = stream.wire.next().await {
                    return error;
                }
            }
        };
        tokio::select! {
            confirmed = confirmed => Ok(confirmed?.is_some()),
            error = discard => Err(error.into()),
        }
    }

    /// Politely if no transaction is open, and until the slot is seen inactive; the lease is released after that.
    async fn close(&self, mut stream: Stream, intake: &Intake) {
        if !intake.tracker.in_transaction() {
            let _ = tokio::time::timeout(Duration::from_millis(250), stream.wire.copy_done()).await;
        }
        stream.wire.close().await;
        let inactive =
            slot::wait_inactive(&stream.sql, &self.engine.source.slot_name, Duration::from_millis(500)).await;
        if !matches!(inactive, Ok(true)) {
            tracing::warn!(source = %self.engine.source.id, "the slot is still active after the stream was closed");
        }
    }
}
