use std::sync::Arc;

use aura_bus::{NatsBus, NatsOptions, SharedBus};
use aura_testkit::{Nats, eventually};

use crate::{
    client::PATIENCE,
    rig::{Rig, change, hasty},
};

#[tokio::test]
async fn r_frt_4_sockets_outlive_the_bus_and_clients_learn_of_the_gap() {
    let mut nats = Nats::start().await.expect("a server");
    let bus: SharedBus = Arc::new(NatsBus::connect(NatsOptions::new(nats.url(), "test")).await.expect("a bus"));
    let rig = Rig::start_with(hasty(), Arc::clone(&bus)).await;
    let mut client = rig.subscriber("t", "alice").await;
    let allowed = [rig.leader.sub_id("t", "alice")];
    rig.change(1, "t", &allowed).await;
    assert_eq!(client.next().await.payload["data"]["record"]["id"], 1);
    nats.stop().await.expect("it stops");
    eventually(PATIENCE, || async { !bus.state().borrow().connected }).await.expect("the loss is noticed");
    client.expect_nothing().await;
    nats.start_again().await.expect("it starts");
    let gap = client.next().await.payload;
    assert_eq!((&gap["status"], &gap["gap"]["reason"]), (&"ok".into(), &"bus".into()), "{gap}");
    rig.publish(change(9, 9, "t", &allowed)).await;
    assert_eq!(client.next().await.payload["data"]["record"]["id"], 9);
}
