use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket};
use futures_util::{SinkExt, stream::SplitSink};
use tokio::time::timeout;

use crate::outbox::{Batch, Ending, Frame, Outbox};

/// What is left to tell a socket that is too slow.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// Close code for who can't keep up: "try again later".
const TOO_SLOW: (u16, &str) = (1013, "too slow, changes were dropped");

/// Writes what is queued until the socket ends: feeds all that is there, then flushes once.
pub(super) async fn run(outbox: &Outbox, mut sink: SplitSink<WebSocket, Message>, limit: Duration, told: &[Frame]) {
    loop {
        let Batch { frames, ending } = outbox.next().await;
        let bytes = frames.iter().map(Frame::len).sum();
        let outcome = tokio::select! {
            biased;
            outcome = timeout(limit, write(&mut sink, frames)) => outcome.unwrap_or(Written::Failed),
            () = outbox.too_slow() => Written::TooSlow,
        };
        outbox.written(bytes);
        match (outcome, ending) {
            (Written::Failed, _) => return,
            (Written::TooSlow, _) | (_, Some(Ending::TooSlow)) => return tell_too_slow(sink, told).await,
            (Written::All, Some(Ending::Close(code, reason))) => return close(sink, code, reason).await,
            (Written::All, None) => {}
        }
    }
}

enum Written {
    All,
    Failed,
    TooSlow,
}

async fn write(sink: &mut SplitSink<WebSocket, Message>, frames: impl IntoIterator<Item = Frame>) -> Written {
    for frame in frames {
        let message = match frame {
            Frame::Text(text) => Message::Text(text),
            Frame::Binary(bytes) => Message::Binary(bytes),
        };
        if sink.feed(message).await.is_err() {
            return Written::Failed;
        }
    }
    if sink.flush().await.is_ok() { Written::All } else { Written::Failed }
}

async fn tell_too_slow(mut sink: SplitSink<WebSocket, Message>, told: &[Frame]) {
    metrics::counter!("front_slow_sockets_total").increment(1);
    // Whether it still hears that is up to it.
    drop(timeout(LAST_WORDS, write(&mut sink, told.iter().cloned())).await);
    close(sink, TOO_SLOW.0, TOO_SLOW.1).await;
}

async fn close(mut sink: SplitSink<WebSocket, Message>, code: u16, reason: &'static str) {
    let frame = CloseFrame { code, reason: reason.into() };
    drop(timeout(LAST_WORDS, sink.send(Message::Close(Some(frame)))).await);
}
