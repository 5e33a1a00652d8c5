//! Live events on the screen, and the one event of `--once`, both received through the real socket.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;

use super::{
    demo::{self, Demo},
    screen::Screen,
    subscriber::{Subscriber, Told},
    summary::event_line,
};

/// `--once` fails after this, counted from the start of the process (design §5.7).
pub(crate) const ONCE_LIMIT: Duration = Duration::from_secs(15);
/// After a lost socket.
const RETRY: Duration = Duration::from_secs(1);

/// Prints every change of the project until stopped; joins again after an error.
pub(crate) async fn show(ws_url: String, key: String, screen: Screen, stop: CancellationToken) {
    let showing = async {
        loop {
            if let Err(error) = show_channel(&ws_url, &key, screen).await {
                tracing::debug!(error = aura_kit::with_causes(&error), "the live view lost its socket");
            }
            sleep(RETRY).await;
        }
    };
    stop.run_until_cancelled(showing).await;
}

async fn show_channel(ws_url: &str, key: &str, screen: Screen) -> Result<()> {
    let mut subscriber = Subscriber::join(ws_url, key, demo::all_changes()).await?;
    loop {
        match subscriber.next().await? {
            Told::Change(data) => show_change(&data, screen),
            Told::System(told) if told["status"] == "error" => {
                screen.note("warning", told["message"].as_str().unwrap_or("the subscription has an error"));
            }
            Told::System(_) => {}
        }
    }
}

fn show_change(data: &Value, screen: Screen) {
    let committed = data["commit_timestamp"].as_str().and_then(|time| time.parse::<Timestamp>().ok());
    let latency = committed.map(|committed| Timestamp::now().as_millisecond() - committed.as_millisecond());
    screen.object("event", json!({"data": data, "commit_to_socket_ms": latency}), &event_line(data, latency));
}

/// Subscribes, inserts, and waits for the row; answers the time since `started`.
pub(crate) async fn once(ws_url: &str, demo: &Demo, admin_url: &str, started: Instant) -> Result<Duration> {
    let first = async {
        let mut subscriber = Subscriber::join(ws_url, &demo.anon_key, demo::all_changes()).await?;
        let body = format!("once {}", Timestamp::now());
        live(&mut subscriber).await?;
        demo::insert_public(admin_url, &demo.schema, &body).await?;
        loop {
            if matches!(subscriber.next().await?, Told::Change(data) if data["record"]["body"] == body.as_str()) {
                return Ok(started.elapsed());
            }
        }
    };
    timeout_at(started + ONCE_LIMIT, first).await.context("no event within 15 s")?
}

/// Waits for the word that changes flow.
async fn live(subscriber: &mut Subscriber) -> Result<()> {
    loop {
        match subscriber.next().await? {
            Told::System(told) if told["status"] == "ok" => return Ok(()),
            Told::System(told) if will_follow(&told) => {}
            Told::System(told) => bail!("the subscription failed: {}", told["message"]),
            Told::Change(_) => {}
        }
    }
}

/// Whether an ok comes once the engine streams: `not_streaming`, maybe with a reason behind it.
fn will_follow(told: &Value) -> bool {
    told["message"].as_str().is_some_and(|message| message.starts_with("not_streaming"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn once_waits_for_an_engine_that_is_slow_to_start() {
        let told = |message: &str| json!({"extension": "postgres_changes", "status": "error", "message": message});
        assert!(will_follow(&told("not_streaming")) && will_follow(&told("not_streaming: waiting_for_transactions")));
        assert!(!will_follow(&told("Unable to subscribe to changes with given parameters.")));
    }
}
