//! R-SEC-6: what each program's user may say and hear, on a real server with `deploy/nats/users.conf`.

use std::time::Duration;

use async_nats::jetstream;
use aura_bus::{Bus, BusError, NatsBus, NatsOptions, Subject};
use aura_domain::ProjectId;
use aura_testkit::{Nats, NatsOptions as ServerOptions};

use crate::{message, next};

const PROJECT: &str = "6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11";

async fn server() -> Nats {
    let options = ServerOptions::default().with_product_users().expect("the file");
    Nats::start_with(options).await.expect("nats-server takes the file")
}

async fn connect(server: &Nats, user: &str) -> NatsBus {
    let inbox = (user == "aura-api").then_some("aura.control.inbox");
    let options =
        NatsOptions { ack_timeout: Duration::from_secs(2), inbox, ..NatsOptions::new(server.url_as(user, user), user) };
    NatsBus::connect(options).await.unwrap_or_else(|error| panic!("{user}: {error}"))
}

/// Subjects of each kind that there is.
fn subjects() -> [(&'static str, String); 5] {
    let project: ProjectId = PROJECT.parse().expect("an id");
    [
        ("changes", Subject::changes(project, "public", "t").to_string()),
        ("gap", Subject::gap(project).to_string()),
        ("channel", Subject::channel(project, true, "room").expect("short").to_string()),
        ("control", Subject::front_heartbeats().to_string()),
        ("other", "somebody.elses".to_owned()),
    ]
}

async fn publishes(bus: &NatsBus) -> Vec<&'static str> {
    let mut allowed = Vec::new();
    for (kind, subject) in subjects() {
        match bus.publish_batch(&[message(&subject, "x")]).await {
            Ok(()) => allowed.push(kind),
            Err(BusError::Refused(why)) => assert!(why.to_lowercase().contains("permissions"), "{why}"),
            Err(error) => panic!("{subject}: {error}"),
        }
    }
    allowed
}

#[tokio::test]
async fn r_sec_6_each_user_publishes_its_own_subjects_and_no_others() {
    let server = server().await;
    let expected: [(&str, &[&str]); 4] = [
        ("aura-worker", &["changes", "gap", "channel", "control"]),
        ("aura-front", &["channel", "control"]),
        ("aura-api", &["control"]),
        ("aura-realtime", &["changes", "gap", "channel", "control"]),
    ];
    for (user, allowed) in expected {
        assert_eq!(publishes(&connect(&server, user).await).await, allowed, "{user}");
    }
}

#[tokio::test]
async fn r_sec_6_nobody_without_a_password_is_let_in() {
    let server = server().await;
    for url in [server.url(), server.url_as("aura-worker", "guessed"), server.url_as("nobody", "aura-worker")] {
        let refused = NatsBus::connect(NatsOptions::new(url, "stranger")).await;
        assert!(matches!(refused, Err(BusError::Refused(_))), "{refused:?}");
    }
}

#[tokio::test]
async fn r_sec_6_the_api_hears_answers_and_nothing_of_the_tenants() {
    let server = server().await;
    let (api, worker) = (connect(&server, "aura-api").await, connect(&server, "aura-worker").await);
    let project: ProjectId = PROJECT.parse().expect("an id");
    // The server refuses the subscription a moment after it was asked for; what counts is that nothing comes.
    let mut spied = api.subscribe(&Subject::project_tree(project)).await.expect("asked for");
    let mut asked = worker.subscribe(&Subject::front_heartbeats()).await.expect("its own");
    worker.publish_batch(&[message(&Subject::gap(project).to_string(), "x")]).await.expect("its own");
    let answering = async {
        let question = next(&mut asked).await;
        let mut answer = message("x", "answer");
        answer.subject = question.reply.expect("where to");
        worker.publish(answer).await.expect("an answer");
    };
    let question = message(Subject::front_heartbeats().as_str(), "?");
    let (answer, ()) = tokio::join!(api.request(question, Duration::from_secs(5)), answering);
    assert_eq!(answer.expect("an answer").payload, "answer");
    assert!(spied.try_next().is_none(), "and the gap, which came before, was not heard");
}

#[tokio::test]
async fn r_sec_6_a_front_has_its_bucket_of_presence() {
    let server = server().await;
    let options = async_nats::ConnectOptions::new().user_and_password("aura-front".into(), "aura-front".into());
    let client = options.connect(server.url()).await.expect("connected");
    let config = jetstream::kv::Config {
        bucket: "aura_presence".to_owned(),
        storage: jetstream::stream::StorageType::Memory,
        max_age: Duration::from_secs(60),
        ..Default::default()
    };
    let presence = jetstream::new(client).create_key_value(config).await.expect("made");
    presence.put("p.room.alice", "here".into()).await.expect("put");
    assert_eq!(presence.get("p.room.alice").await.expect("got").expect("there"), "here");
    presence.delete("p.room.alice").await.expect("gone");
}
