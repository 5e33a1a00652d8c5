//! A source's slot, looked at and freed on a connection of its own: no pool that something stuck may have used up, and no
//! socket of an engine.

use std::time::Duration;

use aura_pgsource::{
    SourceError, SourceUrl, connect_sql,
    ladder::{Climb, Freed, Target, free_slot},
    slot::{self, SlotStatus},
};
use aura_store::Source;
use tokio::time::{Instant, timeout};

/// Connecting, and one statement.
const LOOK: Duration = Duration::from_secs(2);
/// How long an engine that closed its side may take to leave the slot.
const LEAVE: Duration = Duration::from_secs(1);

/// Looks at the slot; `None` when there is none. Ends within 4 s.
pub(super) async fn look(source: &Source) -> Result<Option<SlotStatus>, SourceError> {
    let mut seen = Err(SourceError::Url("can't be parsed"));
    for url in urls(source) {
        let status = look_as(&url?, &source.slot_name).await;
        if seen.is_err() || status.is_ok() {
            seen = status;
        }
        // Another login may see who holds it.
        if seen.as_ref().is_ok_and(|status| !is_nameless(status.as_ref())) {
            break;
        }
    }
    seen
}

async fn look_as(url: &SourceUrl, name: &str) -> Result<Option<SlotStatus>, SourceError> {
    let look = async { slot::status(&*connect_sql(url, "aura-look", None, LOOK).await?, name).await };
    timeout(LOOK, look).await.map_err(|_| SourceError::Timeout { what: "looking at the slot", limit: LOOK })?
}

/// Watches the slot for a moment and ends nobody.
pub(super) async fn observe(source: &Source) -> Result<Option<SlotStatus>, SourceError> {
    let deadline = Instant::now() + LEAVE;
    loop {
        let status = look(source).await?;
        if status.as_ref().is_none_or(|status| !status.active) || Instant::now() >= deadline {
            return Ok(status);
        }
        tokio::time::sleep(LEAVE / 10).await;
    }
}

/// Rungs 4 to 6 within `limit`. As the worker's login first, which may always end its own; then as the admin's, which may
/// reach where the other can't, or see more.
pub(super) async fn free(source: &Source, target: Target<'_>, limit: Duration) -> Climb {
    let deadline = Instant::now() + limit;
    let mut best = Climb::failed(SourceError::Url("can't be parsed"));
    let mut urls = urls(source).peekable();
    while let Some(url) = urls.next() {
        // One login's network may swallow everything: half is for the other one.
        let logins = if urls.peek().is_some() { 2 } else { 1 };
        let left = deadline.saturating_duration_since(Instant::now()) / logins;
        let climb = match url {
            Ok(url) => free_slot(&url, target, left).await,
            Err(error) => Climb::failed(error),
        };
        if matches!(best.freed, Freed::Unknown(_)) || !matches!(climb.freed, Freed::Unknown(_)) {
            best = Climb { rungs: [best.rungs, climb.rungs].concat(), ..climb };
        }
        if is_final(&best.freed) {
            break;
        }
    }
    best
}

/// Another login could not do better.
fn is_final(freed: &Freed) -> bool {
    match freed {
        Freed::Free => true,
        Freed::Foreign(holder) => !holder.application_name.is_empty(),
        Freed::Held(_) | Freed::Unknown(_) => false,
    }
}

fn is_nameless(status: Option<&SlotStatus>) -> bool {
    let holder = status.filter(|status| status.active).and_then(|status| status.holder.as_ref());
    holder.is_some_and(|holder| holder.application_name.is_empty())
}

fn urls(source: &Source) -> impl Iterator<Item = Result<SourceUrl, SourceError>> {
    [Some(&source.replication_url), source.admin_url.as_ref()].into_iter().flatten().map(SourceUrl::from_secret)
}
