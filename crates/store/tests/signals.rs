use std::time::Duration;

use aura_domain::{Lsn, OnDeadline};
use aura_store::{Signal, SignalListener, TableRef};
use aura_testkit::Shutdown;
use tokio::time::timeout;

use crate::{CALLER, PATIENCE, name, platform};

async fn next(listener: &mut SignalListener) -> Signal {
    timeout(PATIENCE, listener.next()).await.expect("a signal in time").expect("the database is there")
}

#[tokio::test]
async fn r_hole_3_every_change_of_desired_state_signals() {
    let platform = platform().await;
    let store = &platform.store;
    let mut listener = store.listen().await.expect("listening");
    let project = platform.project("p").await;
    assert_eq!(next(&mut listener).await, Signal::Project(project));
    let on = platform.enable(project, "t", 7).await;
    assert_eq!(next(&mut listener).await, Signal::Registry(platform.source));
    store.identity_set(on.id, None, Lsn(1), aura_domain::Generation(1)).await.expect("set");
    assert_eq!(next(&mut listener).await, Signal::Registry(platform.source));
    // Nothing changes, nothing is signalled: the next signal is the engine's.
    platform.enable(project, "t", 7).await;
    store.request_stop(platform.source, Duration::from_secs(1), OnDeadline::Force, CALLER).await.expect("written");
    assert_eq!(next(&mut listener).await, Signal::Engines);
    let (schema, table) = (name("app"), name("t"));
    let table = TableRef { project, schema: &schema, table: &table };
    store.disable_table(table, Lsn(2), "actor", None).await.expect("disabled");
    assert_eq!(next(&mut listener).await, Signal::Registry(platform.source));
}

#[tokio::test]
async fn progress_of_registrations_signals_who_waits() {
    let platform = platform().await;
    let store = &platform.store;
    let mut listener = store.listen_status().await.expect("listening");
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    store.set_applied_revision(platform.source, epoch, 1).await.expect("applied");
    let told = timeout(PATIENCE, listener.next()).await.expect("in time").expect("the database is there");
    assert_eq!(told, Some(platform.source));
}

#[tokio::test]
async fn a_lost_connection_is_told_and_signals_come_again() {
    let mut platform = platform().await;
    let mut listener = platform.store.listen().await.expect("listening");
    platform.postgres.restart(Shutdown::Fast).await.expect("restarted");
    // Errors while the server is away are what the caller retries.
    let lost = async {
        loop {
            match listener.next().await {
                Ok(signal) => return signal,
                Err(_) => tokio::task::yield_now().await,
            }
        }
    };
    assert_eq!(timeout(PATIENCE, lost).await.expect("told"), Signal::Lost);
    aura_testkit::eventually(PATIENCE, || async { platform.store.ping().await.is_ok() }).await.expect("it is back");
    platform
        .store
        .request_stop(platform.source, Duration::from_secs(1), OnDeadline::Force, CALLER)
        .await
        .expect("written");
    assert_eq!(next(&mut listener).await, Signal::Engines);
}
