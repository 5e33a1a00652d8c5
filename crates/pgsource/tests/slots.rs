use std::time::Duration;

use anyhow::{Context, Result};
use aura_pgsource::{Plugin, ReplicationConnection, SourceError, SqlState, connect_sql, slot, wal2json_options};
use aura_testkit::{Postgres, PostgresOptions};

use crate::lab::{APP, Lab, PATIENCE, SLOT};

#[tokio::test]
async fn r_eng_8_a_slot_is_created_seen_and_dropped() -> Result<()> {
    let lab = Lab::start().await?;
    assert_eq!(slot::status(&lab.sql, SLOT).await?, None);
    let mut connection = lab.replication().await?;
    let system = connection.identify_system().await?;
    assert_eq!(system.database, "postgres");
    assert!(system.system_identifier.parse::<u64>().is_ok() && system.timeline == 1);
    assert_eq!(connection.wal_sender_timeout().await?, Some(Duration::from_secs(60)));
    let created = connection.create_slot(SLOT, Plugin::Wal2json).await?;
    let error = connection.create_slot(SLOT, Plugin::Wal2json).await.err().context("a second one")?;
    assert_eq!(error.sqlstate(), Some(&SqlState::DUPLICATE_OBJECT));
    assert!(!error.is_connection_error());

    let status = slot::status(&lab.sql, SLOT).await?.context("slot")?;
    assert!(!status.active && !status.is_lost() && status.holder.is_none());
    assert_eq!((status.confirmed_flush, &*status.plugin), (Some(created), "wal2json"));
    assert!(status.wal_end >= created && status.restart.is_some() && status.safe_wal_size.is_some());
    connection.drop_slot(SLOT).await?;
    assert_eq!(slot::status(&lab.sql, SLOT).await?, None);
    Ok(())
}

#[tokio::test]
async fn r_eng_5_shutdown_all_frees_the_slot_at_once() -> Result<()> {
    let lab = Lab::start().await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    let tail = lab.tail(created, &[]).await?;
    let status = slot::status(&lab.sql, SLOT).await?.context("slot")?;
    assert_eq!(status.holder.context("holder")?.application_name, APP);
    assert_eq!(lab.sockets.open(), 1);
    // The stream's owner does nothing at all meanwhile.
    lab.sockets.shutdown_all();
    assert!(slot::wait_inactive(&lab.sql, SLOT, Duration::from_secs(2)).await?);
    let refused = ReplicationConnection::connect(&lab.url, APP, &lab.sockets, PATIENCE).await;
    assert!(matches!(refused, Err(SourceError::Shut)));
    drop(tail);
    tokio::time::timeout(PATIENCE, lab.sockets.closed()).await?;
    Ok(())
}

#[tokio::test]
async fn r_eng_9_a_plugin_that_is_missing_or_not_allowed_is_told_from_other_errors() -> Result<()> {
    let lab = Lab::on(Postgres::start_with(PostgresOptions::default().without_wal2json()).await?).await?;
    let error = lab.create_slot(Plugin::Wal2json).await.err().context("created without its library")?;
    let error = error.downcast::<SourceError>()?;
    assert!(error.is_plugin_unavailable(), "{error}");
    lab.create_slot(Plugin::PgOutput).await?;
    let again = lab.create_slot(Plugin::PgOutput).await.err().context("created twice")?.downcast::<SourceError>()?;
    assert!(!again.is_plugin_unavailable());

    // Servers before the setting came have nothing to forbid.
    let listed = lab.run("alter system set output_plugin_libraries = 'pgoutput'").await;
    if listed.is_ok() {
        let options = PostgresOptions::default().setting("output_plugin_libraries", "pgoutput");
        let lab = Lab::on(Postgres::start_with(options).await?).await?;
        let error = lab.create_slot(Plugin::Wal2json).await.err().context("created what is not allowed")?;
        assert!(error.downcast::<SourceError>()?.is_plugin_unavailable());
    }
    Ok(())
}

#[tokio::test]
async fn a_second_reader_learns_that_the_slot_is_in_use() -> Result<()> {
    let lab = Lab::start().await?;
    let created = lab.create_slot(Plugin::Wal2json).await?;
    let _first = lab.tail(created, &[]).await?;
    let second = lab.replication().await?.start(SLOT, created, &wal2json_options(&[])).await;
    let error = second.err().context("two readers on one slot")?;
    assert_eq!(error.sqlstate(), Some(&SqlState::OBJECT_IN_USE));
    assert!(!error.is_connection_error());
    Ok(())
}

#[tokio::test]
async fn r_eng_5_shutdown_all_cuts_sql_connections_too() -> Result<()> {
    let lab = Lab::start().await?;
    let stuck = connect_sql(&lab.url, APP, Some(&lab.sockets), PATIENCE).await?;
    let query = stuck.batch_execute("select pg_catalog.pg_sleep(600)");
    let (outcome, running) = tokio::join!(query, async {
        let sleeping = "select count(*) = 1 from pg_stat_activity where wait_event = 'PgSleep'";
        let running = aura_testkit::eventually(PATIENCE, || async {
            lab.sql.query_one(sleeping, &[]).await.is_ok_and(|row| row.get(0))
        });
        let running = running.await;
        lab.sockets.shutdown_all();
        running
    });
    running?;
    assert!(SourceError::from(outcome.err().context("the query ended")?).is_connection_error());
    tokio::time::timeout(PATIENCE, lab.sockets.closed()).await?;
    Ok(())
}
