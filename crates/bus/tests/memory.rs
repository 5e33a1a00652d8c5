use std::sync::Arc;

use aura_bus::{Bus, ConnectionState, MemoryBus, SharedBus};

use crate::{conformance, message, next, subject};

async fn start() -> ((), SharedBus) {
    std::future::ready(((), Arc::new(MemoryBus::new()) as SharedBus)).await
}

conformance::suite!(start);

#[tokio::test]
async fn g4_a_full_subscriber_loses_and_is_counted_and_stops_nobody() {
    let bus = MemoryBus::with_capacity(2);
    let mut slow = bus.subscribe(&subject("t.slow")).await.expect("subscribed");
    let mut other = bus.subscribe(&subject("t.>")).await.expect("subscribed");
    for n in 0..5 {
        bus.publish_batch(&[message("t.slow", n.to_string())]).await.expect("received");
        assert_eq!(next(&mut other).await.payload, n.to_string(), "a subscriber that reads gets everything");
    }
    assert_eq!(*bus.state().borrow(), ConnectionState { connected: true, connects: 1, slow_consumer: 3 });
    assert_eq!(next(&mut slow).await.payload, "0");
    assert_eq!(next(&mut slow).await.payload, "1");
    assert_eq!(slow.try_next(), None);
}
