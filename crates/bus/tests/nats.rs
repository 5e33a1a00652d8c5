use std::{sync::Arc, time::Duration};

use aura_bus::{Bus, BusError, NatsBus, NatsOptions, SharedBus};
use aura_testkit::{Nats, NatsOptions as ServerOptions};
use tokio::time::{Instant, timeout};

use crate::{
    PATIENCE,
    conformance::{self, reaches},
    message, next, subject,
};

async fn start() -> (Nats, SharedBus) {
    let server = Nats::start().await.expect("nats-server");
    let bus = connect(&server).await;
    (server, bus)
}

async fn connect(server: &Nats) -> SharedBus {
    Arc::new(NatsBus::connect(NatsOptions::new(server.url(), "test")).await.expect("connected"))
}

async fn impatient(server: &Nats) -> NatsBus {
    let options = NatsOptions { ack_timeout: Duration::from_millis(300), ..NatsOptions::new(server.url(), "test") };
    NatsBus::connect(options).await.expect("connected")
}

conformance::suite!(start);

#[tokio::test]
async fn r_ack_1_no_receipt_from_a_stopped_server() {
    let server = Nats::start().await.expect("nats-server");
    let bus = impatient(&server).await;
    server.pause().expect("SIGSTOP");
    // The signal takes a moment to reach every thread of the server; from then on nothing is received.
    aura_testkit::eventually(PATIENCE, || async { bus.publish_batch(&[message("t.stop", "0")]).await.is_err() })
        .await
        .expect("the server stops");
    let started = Instant::now();
    let stopped = bus.publish_batch(&[message("t.stop", "1")]).await;
    assert!(matches!(stopped, Err(BusError::Timeout(_))), "{stopped:?}");
    assert!(started.elapsed() >= Duration::from_millis(300));
    server.resume().expect("SIGCONT");
    aura_testkit::eventually(PATIENCE, || async { bus.publish_batch(&[message("t.stop", "2")]).await.is_ok() })
        .await
        .expect("receipts come again");
}

/// Ten rounds: the kill hits another moment each time. Whatever is reported as received was received.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r_ack_1_no_receipt_when_the_server_dies_between_publish_and_receipt() {
    let mut server = Nats::start().await.expect("nats-server");
    let bus = connect(&server).await;
    for round in 1..=10_u64 {
        server.pause().expect("SIGSTOP");
        aura_testkit::eventually(PATIENCE, || async {
            bus.request(message("t.nobody", "?"), Duration::from_millis(20))
                .await
                .is_err_and(|error| matches!(error, BusError::Timeout(_)))
        })
        .await
        .expect("the server stops");
        let publishing = {
            let bus = SharedBus::clone(&bus);
            let batch: Vec<_> = (0..500).map(|n| message("t.kill", n.to_string())).collect();
            tokio::spawn(async move { bus.publish_batch(&batch).await })
        };
        server.kill().await.expect("SIGKILL");
        server.start_again().await.expect("nats-server");
        let result = timeout(PATIENCE, publishing).await.expect("it ends").expect("no panic");
        assert!(matches!(result, Err(BusError::Disconnected)), "round {round}: {result:?}");
        reaches(&*bus, |state| state.connected && state.connects > round).await;
    }
}

/// Bytes that were sent to the server and that it hasn't read, as the kernel counts them (proc(5), `/proc/net/tcp`).
fn unread(server: &Nats) -> u64 {
    let table = std::fs::read_to_string("/proc/net/tcp").expect("Linux");
    let port = format!(":{:04X}", server.port());
    let queue = |line: &str| {
        let fields: Vec<_> = line.split_whitespace().collect();
        let (_, received) = fields.get(4).filter(|_| fields[1].ends_with(&port))?.split_once(':')?;
        u64::from_str_radix(received, 16).ok()
    };
    table.lines().skip(1).filter_map(queue).sum()
}

/// A batch that doesn't fit into the socket's buffers when the server dies: what the client still holds goes to the next
/// connection, the request for the receipt included. The receipt comes, and proves nothing: what was sent before is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r_ack_1_a_receipt_of_another_connection_proves_nothing() {
    let mut server = Nats::start().await.expect("nats-server");
    let bus = connect(&server).await;
    server.pause().expect("SIGSTOP");
    let publishing = {
        let bus = SharedBus::clone(&bus);
        let batch: Vec<_> = (0..400).map(|_| message("t.large", "x".repeat(64 << 10))).collect();
        tokio::spawn(async move { bus.publish_batch(&batch).await })
    };
    aura_testkit::eventually(PATIENCE, || async { unread(&server) > 64 << 10 }).await.expect("it fills the buffers");
    server.kill().await.expect("SIGKILL");
    server.start_again().await.expect("nats-server");
    let result = timeout(PATIENCE, publishing).await.expect("it ends").expect("no panic");
    assert!(matches!(result, Err(BusError::Disconnected)), "{result:?}");
}

/// On several threads: there the task that hears of errors may run after the receipt was seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r_ack_1_a_refused_message_fails_its_batch() {
    let config = r#"
        authorization { users = [{ user: worker, password: secret, permissions: {
            publish: ["t.allowed.>", "_INBOX.>"], subscribe: [">"] } }] }"#;
    let server = Nats::start_with(ServerOptions::default().line(config)).await.expect("nats-server");
    let url = server.url().replace("nats://", "nats://worker:secret@");
    let bus = NatsBus::connect(NatsOptions::new(url, "test")).await.expect("credentials come from the URL");
    for round in 0..200 {
        let allowed = message("t.allowed.x", "1");
        bus.publish_batch(std::slice::from_ref(&allowed)).await.expect("received");
        let refused = bus.publish_batch(&[allowed.clone(), message("t.other", "2"), allowed]).await;
        assert!(matches!(&refused, Err(BusError::Refused(why)) if why.contains("Permissions")), "{round}: {refused:?}");
    }
}

#[tokio::test]
async fn wrong_credentials_and_no_server_are_told_apart() {
    let config = r"authorization { user: a, password: b }";
    let server = Nats::start_with(ServerOptions::default().line(config)).await.expect("nats-server");
    let wrong = NatsBus::connect(NatsOptions::new(server.url(), "test")).await.map(|_| ());
    assert!(matches!(wrong, Err(BusError::Refused(_))), "{wrong:?}");
    let place = format!("127.0.0.1:{}", aura_testkit::free_port().expect("a port"));
    let nobody = NatsBus::connect(NatsOptions::new(format!("nats://me:secret@{place}"), "test")).await.map(|_| ());
    let Err(BusError::Unreachable(why)) = nobody else { panic!("{nobody:?}") };
    assert!(why.contains(&place) && why.contains("refused") && !why.contains("secret"), "{why}");
}

#[tokio::test]
async fn r_frt_4_reconnects_are_counted_and_subscriptions_come_back() {
    let (mut server, bus) = start().await;
    let mut subscription = bus.subscribe(&subject("t.again")).await.expect("subscribed");
    assert_eq!(bus.state().borrow().connects, 1);
    for round in 1..=2 {
        server.stop().await.expect("stopped");
        reaches(&*bus, |state| !state.connected).await;
        let down = bus.publish_batch(&[message("t.again", "lost")]).await;
        assert!(matches!(down, Err(BusError::Disconnected)), "{down:?}");
        assert!(matches!(bus.publish(message("t.again", "lost")).await, Err(BusError::Disconnected)));
        server.start_again().await.expect("started");
        reaches(&*bus, |state| state.connected && state.connects == round + 1).await;
        // The subscription is registered by the same connection that answers here.
        bus.publish_batch(&[message("t.again", "here")]).await.expect("received");
        assert_eq!(next(&mut subscription).await.payload, "here", "what was published while down never arrives");
    }
}

#[tokio::test]
async fn max_payload_is_the_servers() {
    let config = "max_payload: 65536".to_owned();
    let server = Nats::start_with(ServerOptions::default().line(config)).await.expect("nats-server");
    let bus = connect(&server).await;
    assert_eq!(bus.max_payload(), 65536);
    let codes: Vec<_> = bus.findings().into_iter().map(|finding| finding.code).collect();
    assert_eq!(codes, ["nats_max_payload"], "R-ENG-9");
    conformance::a_payload_over_the_limit_is_refused_and_nothing_of_its_batch_sent(bus).await;
}

#[tokio::test]
async fn a_full_subscription_loses_and_is_counted() {
    let server = Nats::start().await.expect("nats-server");
    let options = NatsOptions { subscription_capacity: 4, ..NatsOptions::new(server.url(), "test") };
    let bus = NatsBus::connect(options).await.expect("connected");
    let mut slow = bus.subscribe(&subject("t.slow")).await.expect("subscribed");
    let batch: Vec<_> = (0..100).map(|n| message("t.slow", n.to_string())).collect();
    bus.publish_batch(&batch).await.expect("a slow subscriber stops no publisher");
    reaches(&bus, |state| state.slow_consumer > 0).await;
    assert_eq!(next(&mut slow).await.payload, "0");
}
