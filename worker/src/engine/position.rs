//! Remembers the confirmed position in the platform database, beside the intake: a database that hangs must not hold up
//! feedback.

use std::{sync::Arc, time::Duration};

use aura_domain::{Epoch, Generation, Lsn, SourceId};
use aura_store::{Store, StoreError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::gaps::Gaps;

/// The position is remembered this often: what a slot that went back makes us read again (R-LSN-7).
const PERIOD: Duration = Duration::from_secs(5);

/// Writes positions down.
pub(super) struct PositionKeeper {
    pub(super) store: Store,
    pub(super) source: SourceId,
    pub(super) epoch: Epoch,
    /// Cancelled when a write was refused: somebody has raised the epoch.
    pub(super) fenced: CancellationToken,
    pub(super) gaps: Arc<Gaps>,
    pub(super) stop: CancellationToken,
}

impl PositionKeeper {
    /// Runs until `stop`, or until it is fenced. The first position of a session is written at once: it says that the
    /// generation has been entered.
    pub(super) async fn run(self, mut positions: watch::Receiver<Option<(Generation, Lsn)>>) {
        loop {
            tokio::select! {
                () = self.stop.cancelled() => return,
                changed = positions.changed() => if changed.is_err() { return },
            }
            // A position of a generation says that its gap was announced.
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = self.gaps.generation_opened() => {}
            }
            let Some((generation, lsn)) = *positions.borrow_and_update() else { continue };
            match self.store.save_position(self.source, self.epoch, generation, lsn).await {
                Ok(()) => {}
                Err(StoreError::Fenced) => return self.fenced.cancel(),
                Err(error) => tracing::warn!(source = %self.source, %error, "position not remembered"),
            }
            tokio::select! {
                () = self.stop.cancelled() => return,
                () = tokio::time::sleep(PERIOD) => {}
            }
        }
    }
}
