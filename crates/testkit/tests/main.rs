//! The test kit's promises to its users.

use std::time::Duration;

use anyhow::Result;
use aura_testkit::{
    Flow, Nats, NatsOptions, Postgres, PostgresOptions, ProcessOptions, Shutdown, Squatter, SquatterOptions, TcpProxy,
    children_of, eventually, is_running,
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

/// A connection through a fresh proxy: the client's end, the server's end, and the proxy.
async fn through_a_proxy() -> Result<(TcpStream, TcpStream, TcpProxy)> {
    let server = TcpListener::bind(("127.0.0.1", 0)).await?;
    let proxy = TcpProxy::start(server.local_addr()?.port()).await?;
    let client = TcpStream::connect(("127.0.0.1", proxy.port())).await?;
    let (behind, _) = server.accept().await?;
    Ok((client, behind, proxy))
}

async fn is_silent(socket: &mut TcpStream) -> bool {
    tokio::time::timeout(Duration::from_millis(100), socket.read_u8()).await.is_err()
}

#[tokio::test]
async fn the_proxy_swallows_what_is_sent() -> Result<()> {
    let (mut client, mut behind, proxy) = through_a_proxy().await?;
    proxy.set(Flow::Blackhole);
    client.write_all(b"x").await?;
    assert!(is_silent(&mut behind).await);
    proxy.set(Flow::Open);
    client.write_all(b"y").await?;
    assert_eq!(behind.read_u8().await?, b'y', "x is gone for good");
    Ok(())
}

#[tokio::test]
async fn the_proxy_tells_nobody_of_a_close() -> Result<()> {
    let (client, mut behind, proxy) = through_a_proxy().await?;
    proxy.set(Flow::Deaf);
    drop(client);
    assert!(is_silent(&mut behind).await);
    behind.write_all(b"the server doesn't notice").await?;
    proxy.set(Flow::Open);
    assert_eq!(behind.read(&mut [0]).await?, 0);
    Ok(())
}

#[tokio::test]
async fn the_proxy_resets() -> Result<()> {
    let (mut client, _behind, proxy) = through_a_proxy().await?;
    proxy.set(Flow::Reset);
    let error = client.read_u8().await.expect_err("the connection is gone");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    Ok(())
}

#[tokio::test]
async fn the_proxy_knows_connections_by_what_their_client_said_first() -> Result<()> {
    let (mut open, mut behind_open, other) = through_a_proxy().await?;
    let (mut client, mut behind, proxy) = through_a_proxy().await?;
    for (client, behind) in [(&mut open, &mut behind_open), (&mut client, &mut behind)] {
        client.write_all(b"replication").await?;
        behind.read_exact(&mut [0; 11]).await?;
    }
    other.set_where(Flow::Frozen, |said| said.contains("application"));
    proxy.set_where(Flow::Frozen, |said| said.contains("replication"));
    for client in [&mut open, &mut client] {
        client.write_all(b"x").await?;
    }
    assert_eq!(behind_open.read_u8().await?, b'x');
    assert!(is_silent(&mut behind).await);
    proxy.set_where(Flow::Frozen, |said| !said.contains("replication"));
    assert_eq!(behind.read_u8().await?, b'x');
    Ok(())
}

#[tokio::test]
async fn nats_refuses_what_a_user_may_not_publish() -> Result<()> {
    let nats = Nats::start_with(NatsOptions::default().user("ann", "secret", &["a.*"])).await?;
    assert_eq!(nats.url_as("ann", "secret"), format!("nats://ann:secret@127.0.0.1:{}", nats.port()));
    let mut socket = TcpStream::connect(("127.0.0.1", nats.port())).await?;
    let hello = "CONNECT {\"user\":\"ann\",\"pass\":\"secret\",\"verbose\":false}\r\nPUB a.b 0\r\n\r\nPING\r\n";
    socket.write_all(hello.as_bytes()).await?;
    let mut said = String::new();
    while !said.contains("PONG") {
        let mut buffer = [0; 4096];
        let length = socket.read(&mut buffer).await?;
        assert!(length > 0, "{said}");
        said += &String::from_utf8_lossy(&buffer[..length]);
    }
    assert!(said.contains("Permissions Violation for Publish to \"a.b\""), "{said}");
    Ok(())
}

/// flow-control.md E2: no timeout frees a slot whose client only says that it is alive.
#[tokio::test]
async fn a_squatter_holds_a_slot_beyond_the_timeout_and_blocks_its_server() -> Result<()> {
    let options = PostgresOptions::default().setting("wal_sender_timeout", "1s");
    let postgres = Postgres::start_with(options).await?;
    let sql = postgres.client("postgres").await?;
    sql.batch_execute("create table t (v text)").await?;
    sql.batch_execute("select pg_create_logical_replication_slot('s', 'test_decoding')").await?;
    sql.batch_execute("insert into t select repeat('x', 1000) from generate_series(1, 20000)").await?;
    let slot = postgres.slot("s").await?;
    let squatter = Squatter::start(SquatterOptions {
        port: postgres.port(),
        login: None,
        database: "postgres".to_owned(),
        slot: "s".to_owned(),
        application_name: "somebody".to_owned(),
        plugin_options: vec![("skip-empty-xacts".to_owned(), "1".to_owned())],
    })
    .await?;
    let blocked = slot
        .wait(SOON, |state| state.is_some_and(|state| state.wait_event.as_deref() == Some("WalSenderWriteData")))
        .await?
        .expect("it is there");
    assert_eq!((blocked.application_name.as_deref(), blocked.flush), (Some("somebody"), None));
    let ended = slot.wait(Duration::from_secs(3), |state| state.is_none_or(|state| !state.active)).await;
    assert!(ended.is_err(), "three times the timeout, and it still holds the slot");
    assert!(squatter.is_connected());
    drop(squatter);
    slot.wait_free(SOON).await
}
