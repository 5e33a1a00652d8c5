use aura_store::{Store, StoreError, migrate};
use aura_testkit::Postgres;

use crate::{key, owned_database};

#[tokio::test]
async fn migrating_twice_is_harmless_and_says_what_it_did() {
    let postgres = Postgres::start().await.expect("PostgreSQL");
    let url = owned_database(&postgres).await;
    let store = Store::connect(&url, key()).await.expect("an unmigrated database can be connected to");
    assert!(!store.schema_is_current().await.expect("an answer"));
    assert!(matches!(store.sources().await, Err(StoreError::NotMigrated)));
    let applied = migrate(&url).await.expect("migrated by an owner who is no superuser");
    assert_eq!(applied.first().map(String::as_str), Some("0001_platform"));
    assert!(store.schema_is_current().await.expect("an answer"));
    assert_eq!(migrate(&url).await.expect("again"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_at_once_one_migrates_under_the_advisory_lock() {
    let postgres = Postgres::start().await.expect("PostgreSQL");
    let url = owned_database(&postgres).await;
    let tasks: Vec<_> = (0..6)
        .map(|_| {
            let url = url.clone();
            tokio::spawn(async move { migrate(&url).await })
        })
        .collect();
    let mut applied = Vec::new();
    for task in tasks {
        applied.push(task.await.expect("no panic").expect("nobody fails"));
    }
    assert_eq!(applied.iter().filter(|names| !names.is_empty()).count(), 1, "{applied:?}");
}

#[tokio::test]
async fn a_wrong_url_is_told_without_its_password() {
    for url in ["postgres://u:topsecret@[bad", "mysql://u:topsecret@h/d", "postgres://u:topsecret@127.0.0.1:1/d"] {
        let error = Store::connect(url, key()).await.map(|_| ()).expect_err(url);
        let text = format!("{error} {error:?}");
        assert!(!text.contains("topsecret"), "{text}");
    }
}
