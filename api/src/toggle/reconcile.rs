//! Finishes what a crash or a lock left half done, or says what it waits for (R-REG-3).

use std::{collections::HashMap, time::Duration};

use aura_kit::Code;
use aura_store::{Registration, Signal, SignalListener, Store};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::identity;
use crate::{error::Result, state::AppState};

/// How often to look for half states when nothing signals.
const PERIOD: Duration = Duration::from_secs(10);
/// After a signal: a request that has just begun finishes what it does by itself (see [`Store::unfinished`]).
const GRACE: Duration = Duration::from_secs(6);
/// Longest pause between two tries on one table.
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// Runs until `stop`: at the start, at signals and every 10 s it looks for enabled tables whose ALTER is still missing
/// and for disabled ones that still are as we set them, and sees to them, with a pause per table that doubles from 10 s to
/// 5 min.
pub(crate) async fn reconcile(state: &AppState, stop: &CancellationToken) {
    let work = async {
        let (mut backoff, mut signals) = (Backoff::default(), None);
        loop {
            if let Err(error) = round(state, &mut backoff).await {
                tracing::warn!(code = %error.code(), "reconciler");
            }
            let signal = tokio::time::timeout(PERIOD, signalled(state.store(), &mut signals));
            if signal.await.is_ok() {
                tokio::time::sleep(GRACE).await;
            }
        }
    };
    stop.run_until_cancelled(Box::pin(work)).await;
}

/// Returns once some registration has changed; without a listener the period has to do.
async fn signalled(store: &Store, signals: &mut Option<SignalListener>) {
    if signals.is_none() {
        *signals = store.listen().await.ok();
    }
    while let Some(listener) = signals {
        match listener.next().await {
            Ok(Signal::Registry(_) | Signal::Lost) => return,
            Ok(_) => {}
            Err(_) => *signals = None,
        }
    }
    std::future::pending::<()>().await;
}

async fn round(state: &AppState, backoff: &mut Backoff) -> Result<()> {
    let unfinished = state.store().unfinished().await?;
    backoff.keep_only(&unfinished);
    for known in unfinished {
        let id = known.id;
        if !backoff.is_due(id) {
            continue;
        }
        match finish(state, &known).await {
            Ok(true) => backoff.succeeded(id),
            Ok(false) => backoff.failed(id),
            Err(error) => {
                tracing::warn!(code = %error.code(), registration = %id, "a replica identity is not as it should be yet");
                backoff.failed(id);
            }
        }
    }
    Ok(())
}

/// False = not yet.
async fn finish(state: &AppState, known: &Registration) -> Result<bool> {
    let _turn = state.locks().turn(known.project, &known.schema, &known.table).await?;
    let store = state.store();
    // The request that left it may have finished it while we waited for our turn.
    let Some(latest) = store.registration_by_id(known.id).await? else { return Ok(true) };
    let admin = state.sources().admin(store, known.source).await?;
    let done = match (latest.enabled, latest.identity_set) {
        (true, true) => true,
        (true, false) => {
            identity::set_or_say(store, &admin, &latest).await?;
            true
        }
        (false, _) => identity::restore(store, &admin, &latest, true).await?,
    };
    admin.done();
    Ok(done)
}

/// For people: why a registration is still pending.
pub(super) fn waits_for(code: Code) -> &'static str {
    match code {
        Code::LockTimeout => "another transaction holds a lock on the table; it is tried again",
        Code::NotTableOwner => "our role doesn't own the table: its owner has to set REPLICA IDENTITY FULL",
        Code::ReplicaIdentityNotFull => "in manual mode its owner has to set REPLICA IDENTITY FULL",
        Code::ConcurrentChange => "the table was dropped or replaced; enable it again",
        _ => "the source doesn't answer as it should; it is tried again",
    }
}

/// When to try which registration again.
#[derive(Default)]
struct Backoff(HashMap<Uuid, (Instant, Duration)>);

impl Backoff {
    fn is_due(&self, id: Uuid) -> bool {
        self.0.get(&id).is_none_or(|(at, _)| Instant::now() >= *at)
    }

    fn succeeded(&mut self, id: Uuid) {
        self.0.remove(&id);
    }

    fn failed(&mut self, id: Uuid) {
        let pause = self.0.get(&id).map_or(PERIOD, |(_, pause)| (*pause * 2).min(MAX_BACKOFF));
        self.0.insert(id, (Instant::now() + pause, pause));
    }

    fn keep_only(&mut self, unfinished: &[Registration]) {
        self.0.retain(|id, _| unfinished.iter().any(|known| known.id == *id));
    }
}
