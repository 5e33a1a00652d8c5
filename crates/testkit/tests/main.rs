//! The test kit's promises to its users.

use std::time::Duration;

use anyhow::Result;
use aura_testkit::{
    Flow, Nats, Postgres, PostgresOptions, ProcessOptions, Shutdown, TcpProxy, children_of, eventually, is_running,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn a_cluster_decodes_with_wal2json_and_survives_a_crash() -> Result<()> {
    let mut postgres = Postgres::start().await?;
    postgres.create_database("app").await?;
    let client = postgres.client("app").await?;
    client.batch_execute("create table t (id int); insert into t values (1)").await?;
    client.execute("select pg_create_logical_replication_slot('s', 'wal2json')", &[]).await?;
    postgres.restart(Shutdown::Immediate).await?;
    let count: i64 = postgres.client("app").await?.query_one("select count(*) from t", &[]).await?.get(0);
    assert_eq!(count, 1);
    Ok(())
}

#[tokio::test]
async fn a_cluster_without_wal2json_lacks_only_that() -> Result<()> {
    let postgres = Postgres::start_with(PostgresOptions::default().without_wal2json()).await?;
    let client = postgres.client("postgres").await?;
    let slot = |plugin| format!("select pg_create_logical_replication_slot('s', '{plugin}')");
    assert!(client.batch_execute(&slot("wal2json")).await.is_err());
    client.batch_execute(&slot("pgoutput")).await?;
    Ok(())
}

#[tokio::test]
async fn dropping_a_cluster_leaves_nothing() -> Result<()> {
    let postgres = Postgres::start().await?;
    let (pid, data) = (postgres.pid().expect("it runs"), postgres.data_dir());
    let family = children_of(pid);
    assert!(!family.is_empty());
    drop(postgres);
    eventually(SOON, || async { !family.iter().chain([&pid]).any(|pid| is_running(*pid)) }).await?;
    assert!(!data.exists());
    Ok(())
}

#[tokio::test]
async fn nats_starts_again_on_its_port() -> Result<()> {
    let mut nats = Nats::start().await?;
    nats.kill().await?;
    assert!(TcpStream::connect(("127.0.0.1", nats.port())).await.is_err());
    nats.start_again().await?;
    TcpStream::connect(("127.0.0.1", nats.port())).await?;
    Ok(())
}

#[tokio::test]
async fn a_process_tells_its_lines_and_how_it_ended() -> Result<()> {
    let shell = ProcessOptions::new("sh").args(["-c", "echo out; echo err >&2; exit 3"]).start()?;
    shell.line(SOON, |line| line == "err").await?;
    assert_eq!(shell.wait(SOON).await?.code(), Some(3));
    let cat = ProcessOptions::new("cat").writable().start()?;
    cat.write_line("echoed")?;
    cat.line(SOON, |line| line == "echoed").await?;
    cat.close_stdin();
    cat.succeeds(SOON).await?;
    assert!(shell.succeeds(SOON).await.is_err_and(|error| error.to_string().contains("out")));
    Ok(())
}

#[tokio::test]
async fn the_proxy_freezes_and_cuts() -> Result<()> {
    let server = TcpListener::bind(("127.0.0.1", 0)).await?;
    let proxy = TcpProxy::start(server.local_addr()?.port()).await?;
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await?;
    let (mut behind, _) = server.accept().await?;
    proxy.set(Flow::Frozen);
    client.write_all(b"x").await?;
    let held = tokio::time::timeout(Duration::from_millis(100), behind.read_u8()).await;
    assert!(held.is_err(), "nothing passes a frozen proxy");
    proxy.set(Flow::Open);
    assert_eq!(behind.read_u8().await?, b'x');
    proxy.set(Flow::Cut);
    assert_eq!(client.read(&mut [0]).await.unwrap_or(0), 0);
    Ok(())
}
