//! One suite, run on each bus by the macro at the end.

use aura_bus::{Bus, BusError, Headers, Message, SharedBus};
use aura_domain::{Epoch, SourceId};
use bytes::Bytes;

use crate::{PATIENCE, assert_empty, message, next, subject};

pub(crate) async fn order_is_kept_across_batches_and_singles(bus: SharedBus) {
    let mut subscription = bus.subscribe(&subject("t.order")).await.expect("subscribed");
    let text = |n: usize| message("t.order", n.to_string());
    for batch in 0..20 {
        let first = batch * 51;
        bus.publish_batch(&(first..first + 50).map(text).collect::<Vec<_>>()).await.expect("received");
        bus.publish(text(first + 50)).await.expect("sent");
    }
    for n in 0..20 * 51 {
        assert_eq!(next(&mut subscription).await.payload, n.to_string());
    }
}

pub(crate) async fn every_subscriber_gets_every_message(bus: SharedBus) {
    let mut all = Vec::new();
    for _ in 0..5 {
        all.push(bus.subscribe(&subject("t.fan")).await.expect("subscribed"));
    }
    bus.publish_batch(&[message("t.fan", "1"), message("t.fan", "2")]).await.expect("received");
    for subscription in &mut all {
        assert_eq!(next(subscription).await.payload, "1");
        assert_eq!(next(subscription).await.payload, "2");
        assert_empty(&*bus, subscription, "t.fan").await;
    }
}

pub(crate) async fn wildcards_match_as_nats_does(bus: SharedBus) {
    let mut star = bus.subscribe(&subject("w.*.c")).await.expect("subscribed");
    let mut tail = bus.subscribe(&subject("w.>")).await.expect("subscribed");
    let sent = ["w.a.c", "w.a.d", "w.a.c.d", "v.a.c", "w"];
    bus.publish_batch(&sent.map(|text| message(text, text))).await.expect("received");
    assert_eq!(next(&mut star).await.subject, subject("w.a.c"));
    assert_empty(&*bus, &mut star, "w.z.c").await;
    for text in ["w.a.c", "w.a.d", "w.a.c.d"] {
        assert_eq!(next(&mut tail).await.payload, text);
    }
}

pub(crate) async fn headers_arrive(bus: SharedBus) {
    let headers = Headers {
        origin: Some("front-7".to_owned()),
        source: Some("0b0e9d6e-0000-4000-8000-000000000001".parse::<SourceId>().expect("an id")),
        epoch: Some(Epoch(i64::MAX)),
    };
    let mut subscription = bus.subscribe(&subject("t.headers")).await.expect("subscribed");
    let bare = message("t.headers", "bare");
    let full = Message { headers: headers.clone(), ..message("t.headers", "full") };
    bus.publish_batch(&[full, bare]).await.expect("received");
    assert_eq!(next(&mut subscription).await.headers, headers);
    assert_eq!(next(&mut subscription).await.headers, Headers::default());
}

pub(crate) async fn a_request_gets_its_own_answer(bus: SharedBus) {
    let mut service = bus.subscribe(&subject("t.echo")).await.expect("subscribed");
    let server = {
        let bus = SharedBus::clone(&bus);
        tokio::spawn(async move {
            for _ in 0..50 {
                let request = next(&mut service).await;
                let reply = request.reply.expect("a request has a reply subject");
                bus.publish(Message::new(reply, request.payload)).await.expect("answered");
            }
        })
    };
    let ask = |n: usize| {
        let bus = SharedBus::clone(&bus);
        async move {
            let answer = bus.request(message("t.echo", n.to_string()), PATIENCE).await.expect("an answer");
            assert_eq!(answer.payload, n.to_string());
        }
    };
    futures_util::future::join_all((0..50).map(ask)).await;
    server.await.expect("the service ends");
}

pub(crate) async fn a_request_that_nobody_serves_fails_at_once(bus: SharedBus) {
    let started = std::time::Instant::now();
    let answer = bus.request(message("t.nobody", "?"), PATIENCE).await;
    assert!(matches!(answer, Err(BusError::NoResponders)), "{answer:?}");
    assert!(started.elapsed() < PATIENCE / 2, "it isn't the time-out");
}

pub(crate) async fn a_request_without_answer_times_out(bus: SharedBus) {
    let mut silent = bus.subscribe(&subject("t.silent")).await.expect("subscribed");
    let answer = bus.request(message("t.silent", "?"), std::time::Duration::from_millis(50)).await;
    assert!(matches!(answer, Err(BusError::Timeout(_))), "{answer:?}");
    assert_eq!(next(&mut silent).await.payload, "?");
}

pub(crate) async fn a_payload_over_the_limit_is_refused_and_nothing_of_its_batch_sent(bus: SharedBus) {
    let mut subscription = bus.subscribe(&subject("t.size")).await.expect("subscribed");
    let over = Message::new(subject("t.size"), Bytes::from(vec![b'x'; bus.max_payload() + 1]));
    let batch = bus.publish_batch(&[message("t.size", "first"), over.clone()]).await;
    assert!(matches!(batch, Err(BusError::Refused(_))), "{batch:?}");
    assert!(matches!(bus.publish(over.clone()).await, Err(BusError::Refused(_))));
    assert!(matches!(bus.request(over, PATIENCE).await, Err(BusError::Refused(_))));
    assert_empty(&*bus, &mut subscription, "t.size").await;
    let full = Message::new(subject("t.size"), Bytes::from(vec![b'x'; bus.max_payload()]));
    bus.publish_batch(&[full]).await.expect("exactly the limit passes");
    assert_eq!(next(&mut subscription).await.payload.len(), bus.max_payload());
}

pub(crate) async fn a_dropped_subscription_gets_nothing_more(bus: SharedBus) {
    let dropped = bus.subscribe(&subject("t.drop")).await.expect("subscribed");
    drop(dropped);
    // Its end may take effect a moment later; then nobody serves the subject.
    let gone = aura_testkit::eventually(PATIENCE, || async {
        let answer = bus.request(message("t.drop", "?"), std::time::Duration::from_millis(50)).await;
        matches!(answer, Err(BusError::NoResponders))
    });
    gone.await.expect("the subscription ended");
}

pub(crate) async fn an_empty_batch_is_received(bus: SharedBus) {
    bus.publish_batch(&[]).await.expect("nothing to receive");
}

pub(crate) async fn concurrent_batches_keep_their_own_order(bus: SharedBus) {
    let mut subscription = bus.subscribe(&subject("t.many.*")).await.expect("subscribed");
    let publish = |who: usize| {
        let bus = SharedBus::clone(&bus);
        async move {
            for n in 0..20 {
                let one = message(&format!("t.many.{who}"), n.to_string());
                bus.publish_batch(&[one]).await.expect("received");
            }
        }
    };
    futures_util::future::join_all((0..8).map(publish)).await;
    let mut seen = std::collections::HashMap::new();
    for _ in 0..8 * 20 {
        let message = next(&mut subscription).await;
        let count = seen.entry(message.subject).or_insert(0_usize);
        assert_eq!(message.payload, count.to_string());
        *count += 1;
    }
}

pub(crate) async fn try_next_never_waits(bus: SharedBus) {
    let mut subscription = bus.subscribe(&subject("t.try")).await.expect("subscribed");
    assert_eq!(subscription.try_next(), None);
    bus.publish_batch(&[message("t.try", "1")]).await.expect("received");
    let arrived = aura_testkit::eventually_some(PATIENCE, || {
        let now = subscription.try_next();
        async move { now }
    });
    assert_eq!(arrived.await.expect("it arrives").payload, "1");
}

/// Runs the suite on a bus: `$start` yields a guard that keeps its server alive, and the bus.
macro_rules! suite {
    ($start:path: $($test:ident),+ $(,)?) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let (_guard, bus) = $start().await;
                $crate::conformance::$test(bus).await;
            }
        )+
    };
    ($start:path) => {
        $crate::conformance::suite!($start:
            order_is_kept_across_batches_and_singles,
            every_subscriber_gets_every_message,
            wildcards_match_as_nats_does,
            headers_arrive,
            a_request_gets_its_own_answer,
            a_request_that_nobody_serves_fails_at_once,
            a_request_without_answer_times_out,
            a_payload_over_the_limit_is_refused_and_nothing_of_its_batch_sent,
            a_dropped_subscription_gets_nothing_more,
            an_empty_batch_is_received,
            concurrent_batches_keep_their_own_order,
            try_next_never_waits,
        );
    };
}
pub(crate) use suite;

/// A state of the connection that a test waits for.
pub(crate) async fn reaches(bus: &dyn Bus, wanted: impl Fn(&aura_bus::ConnectionState) -> bool) {
    let mut state = bus.state();
    let reached = tokio::time::timeout(PATIENCE, state.wait_for(|state| wanted(state))).await;
    reached.expect("the state in time").expect("the bus is open");
}
