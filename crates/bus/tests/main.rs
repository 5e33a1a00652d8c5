//! Both buses do the same (`conformance`); what only a real server can do is in `nats`.

mod conformance;
mod memory;
mod nats;
mod permissions;

use std::time::Duration;

use aura_bus::{Bus, Message, Subject, Subscription};

/// Far above what anything here takes; a test fails with it, never passes by it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

pub(crate) fn subject(text: &str) -> Subject {
    Subject::from_bus(text.to_owned())
}

pub(crate) fn message(subject_text: &str, payload: impl Into<Vec<u8>>) -> Message {
    Message::new(subject(subject_text), payload.into())
}

/// The next message; panics if none comes.
pub(crate) async fn next(subscription: &mut Subscription) -> Message {
    let next = tokio::time::timeout(PATIENCE, subscription.next()).await;
    next.expect("a message in time").expect("the bus is open")
}

/// Proves that nothing is left in the subscription: a marker sent now is the next message.
pub(crate) async fn assert_empty(bus: &dyn Bus, subscription: &mut Subscription, on: &str) {
    bus.publish_batch(&[message(on, "marker")]).await.expect("published");
    assert_eq!(next(subscription).await.payload, "marker");
}
