//! Batches with a receipt (R-ACK-1).
//!
//! The server handles the lines of one connection in order, so when a message to an own inbox, sent behind the batch on
//! the same connection, comes back, the server has handled the batch: *provided* the connection didn't change in between,
//! and no message was refused. Refusals are the difficult part, since async-nats hands server errors to another task,
//! which may run after the receipt was seen. But it counts the bytes it reads before it looks at them, and on this
//! connection nothing is expected except receipts, whose size is known. So more bytes than the receipt's mean that
//! something else was said: the batch isn't proved then, and is published again.

use std::{sync::Arc, time::Duration};

use async_nats::Subscriber;
use futures_util::{FutureExt as _, StreamExt as _};
use tokio::time::timeout;

use super::{Link, send};
use crate::{BusError, Message};

/// `PING\r\n` and `PONG\r\n`, one or both: the only other lines of a healthy connection, apart from a rare INFO. The
/// shortest error is longer than both.
const PINGS: std::ops::RangeInclusive<u64> = 0..=12;

/// How long an error that was read may take to reach us through the other task; only waited after an unproved batch.
const ERROR_DELAY: Duration = Duration::from_millis(50);

#[derive(Debug)]
pub(super) struct Publisher {
    link: Arc<Link>,
    inbox: String,
    receipts: Subscriber,
    /// Size of a receipt on the wire.
    receipt_bytes: u64,
    /// Number of the last receipt asked for.
    asked: u64,
}

/// State of the connection before a batch.
struct Before {
    connects: u64,
    errors: u64,
    bytes: u64,
}

impl Publisher {
    /// Subscribes the inbox, as the connection's first subscription, and proves that receipts come and are as expected.
    pub(super) async fn new(link: Arc<Link>, patience: Duration) -> Result<Self, BusError> {
        let inbox = link.client().new_inbox();
        let receipts = link.client().subscribe(inbox.clone()).await.map_err(|_| BusError::Disconnected)?;
        // The client numbers its subscriptions from 1; the payload is 16 hex digits.
        let receipt_bytes = format!("MSG {inbox} 1 16\r\n0123456789abcdef\r\n").len() as u64;
        let mut publisher = Self { link, inbox, receipts, receipt_bytes, asked: 0 };
        let proved = timeout(patience, publisher.first_receipt()).await;
        proved.unwrap_or(Err(BusError::Timeout(patience))).map(|()| publisher)
    }

    /// A server that is starting may have something to say, an INFO, beside the first receipt.
    async fn first_receipt(&mut self) -> Result<(), BusError> {
        loop {
            match self.publish(&[]).await {
                Err(BusError::Disconnected) => tokio::time::sleep(ERROR_DELAY).await,
                done => return done,
            }
        }
    }

    /// Publishes and awaits the receipt; the caller bounds the time. If it is dropped half-way, the receipt that comes
    /// later is recognised by its number.
    pub(super) async fn publish(&mut self, messages: &[Message]) -> Result<(), BusError> {
        // Receipts that came after their caller had given up.
        while let Some(Some(_)) = self.receipts.next().now_or_never() {}
        let before = self.before();
        let mut changes = self.link.changes();
        if !self.link.is_connected() {
            return Err(BusError::Disconnected);
        }
        tokio::select! {
            biased;
            result = self.exchange(messages, &before) => result,
            _ = changes.wait_for(|connected| !connected) => Err(BusError::Disconnected),
        }
    }

    async fn exchange(&mut self, messages: &[Message], before: &Before) -> Result<(), BusError> {
        for message in messages {
            send(self.link.client(), message).await?;
        }
        self.asked += 1;
        let number = format!("{:016x}", self.asked);
        let asked = self.link.client().publish(self.inbox.clone(), number.clone().into()).await;
        asked.map_err(|_| BusError::Disconnected)?;
        let mut receipts = 0;
        loop {
            let receipt = self.receipts.next().await.ok_or(BusError::Disconnected)?;
            receipts += 1;
            if receipt.payload == number {
                return self.prove(before, receipts).await;
            }
        }
    }

    fn before(&self) -> Before {
        Before { connects: self.link.connects(), errors: self.link.errors(), bytes: self.link.bytes_read() }
    }

    /// Whether the connection is the same and said nothing but `receipts` receipts since.
    async fn prove(&self, before: &Before, receipts: u64) -> Result<(), BusError> {
        if self.link.connects() != before.connects {
            return Err(BusError::Disconnected);
        }
        let others = (self.link.bytes_read() - before.bytes).checked_sub(receipts * self.receipt_bytes);
        if others.is_some_and(|bytes| PINGS.contains(&bytes)) && self.link.errors() == before.errors {
            return Ok(());
        }
        if self.link.more_errors(before.errors, ERROR_DELAY).await {
            Err(self.refused())
        } else {
            Err(BusError::Disconnected)
        }
    }

    fn refused(&self) -> BusError {
        BusError::Refused(self.link.last_error())
    }
}
