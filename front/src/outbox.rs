use std::collections::VecDeque;

use axum::extract::ws::Utf8Bytes;
use bytes::Bytes;
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::Notify;

use crate::told::Told;

/// What waits for a connection; cheap to clone, so that one encoding serves all who get the same.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame {
    /// Text of a WebSocket or of an event stream.
    Text(Utf8Bytes),
    /// Binary frame of a WebSocket.
    Binary(Bytes),
}

impl Frame {
    pub(crate) fn text(text: String) -> Self {
        Self::Text(text.into())
    }

    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Binary(bytes) => bytes.len(),
        }
    }
}

/// How a connection ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ending {
    /// After what is queued, with this close code and reason.
    Close(u16, &'static str),
    /// More was queued than the limit; the queue is gone.
    TooSlow,
}

/// The bounded queue of one connection. Pushing never waits: who can't keep up is closed, never silently starved.
#[derive(Debug)]
pub(crate) struct Outbox {
    queue: Mutex<Queue>,
    ready: Notify,
    limit: usize,
    /// What its client was told once.
    pub(crate) told: Told,
}

#[derive(Debug, Default)]
struct Queue {
    frames: VecDeque<Frame>,
    /// Of `frames` and of those that were taken and not yet written.
    bytes: usize,
    ending: Option<Ending>,
}

/// What there is to write.
#[derive(Debug)]
pub(crate) struct Batch {
    pub(crate) frames: VecDeque<Frame>,
    pub(crate) ending: Option<Ending>,
}

impl Outbox {
    /// A queue of at most `limit` bytes.
    pub(crate) fn new(limit: usize) -> Self {
        Self { queue: Mutex::default(), ready: Notify::new(), limit, told: Told::default() }
    }

    /// Queues a frame, unless the connection is ending.
    pub(crate) fn push(&self, frame: Frame) {
        let mut queue = self.queue();
        if queue.ending.is_some() {
            return;
        }
        queue.bytes += frame.len();
        // A single frame may be larger than the limit: it must still get through to somebody who reads.
        if queue.bytes > self.limit && queue.bytes > frame.len() {
            queue.frames.clear();
            queue.ending = Some(Ending::TooSlow);
        } else {
            queue.frames.push_back(frame);
        }
        drop(queue);
        self.ready.notify_one();
    }

    /// Ends the connection once what is queued has been written. The first ending stays.
    pub(crate) fn close(&self, code: u16, reason: &'static str) {
        self.end(Ending::Close(code, reason));
    }

    /// Ends the connection as too slow.
    pub(crate) fn overflow(&self) {
        self.end(Ending::TooSlow);
    }

    fn end(&self, ending: Ending) {
        self.queue().ending.get_or_insert(ending);
        self.ready.notify_one();
    }

    /// Everything that is queued, as soon as there is something. For one reader; cancel-safe.
    pub(crate) async fn next(&self) -> Batch {
        loop {
            {
                let mut queue = self.queue();
                if !queue.frames.is_empty() || queue.ending.is_some() {
                    return Batch { frames: std::mem::take(&mut queue.frames), ending: queue.ending };
                }
            }
            self.ready.notified().await;
        }
    }

    /// Returns when the connection was found too slow, also while a batch is being written. Cancel-safe.
    pub(crate) async fn too_slow(&self) {
        while self.queue().ending != Some(Ending::TooSlow) {
            self.ready.notified().await;
        }
    }

    /// Bytes of a batch have been written.
    pub(crate) fn written(&self, bytes: usize) {
        let mut queue = self.queue();
        queue.bytes = queue.bytes.saturating_sub(bytes);
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // The queue is consistent after every statement, so a panic elsewhere does no harm.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(len: usize) -> Frame {
        Frame::text("x".repeat(len))
    }

    #[tokio::test]
    async fn r_frt_2_a_queue_over_its_limit_ends_the_connection() {
        let outbox = Outbox::new(100);
        outbox.push(frame(60));
        let batch = outbox.next().await;
        assert_eq!((batch.frames.len(), batch.ending), (1, None));
        outbox.push(frame(40));
        outbox.push(frame(1));
        let batch = outbox.next().await;
        assert_eq!((batch.frames.len(), batch.ending), (0, Some(Ending::TooSlow)), "what is being written counts");
        outbox.too_slow().await;
    }

    #[tokio::test]
    async fn written_bytes_make_room_and_closing_writes_what_is_queued() {
        let outbox = Outbox::new(100);
        outbox.push(frame(90));
        outbox.next().await;
        outbox.written(90);
        outbox.push(frame(90));
        outbox.close(1012, "bye");
        outbox.push(frame(1));
        outbox.overflow();
        let batch = outbox.next().await;
        assert_eq!((batch.frames.len(), batch.ending), (1, Some(Ending::Close(1012, "bye"))));
    }

    #[tokio::test]
    async fn one_frame_over_the_limit_gets_through() {
        let outbox = Outbox::new(100);
        outbox.push(frame(500));
        assert_eq!(outbox.next().await.ending, None);
    }
}
