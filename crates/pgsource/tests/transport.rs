use std::time::Duration;

use anyhow::{Context, Result};
use aura_pgsource::{ReplicationConnection, Sockets, SourceError, SourceUrl, SqlState, connect_sql};

use crate::lab::{Lab, PATIENCE};

async fn connect(url: &str) -> Result<(), SourceError> {
    let url = SourceUrl::parse(url)?;
    ReplicationConnection::connect(&url, "test", &Sockets::new(), PATIENCE).await?.close().await;
    connect_sql(&url, "test", None, PATIENCE).await.map(drop)
}

/// Lets `user` in by `method` only.
async fn require(lab: &Lab, method: &str, user: &str) -> Result<()> {
    let file = lab.postgres.data_dir().join("pg_hba.conf");
    let rest = tokio::fs::read_to_string(&file).await?;
    tokio::fs::write(&file, format!("host all {user} 127.0.0.1/32 {method}\n{rest}")).await?;
    lab.run("select pg_reload_conf()").await?;
    // The postmaster reads it when it gets the signal.
    let seen = format!("select exists (select from pg_hba_file_rules where '{user}' = any(user_name))");
    aura_testkit::eventually(PATIENCE, || async {
        let wrong = lab.postgres.url_as(user, "wrong", "postgres");
        let loaded = lab.sql.query_one(&seen, &[]).await.is_ok_and(|row| row.get(0));
        loaded && (method == "trust" || connect(&wrong).await.is_err())
    })
    .await
}

#[tokio::test]
async fn every_password_method_lets_in_the_right_password_only() -> Result<()> {
    let lab = Lab::start().await?;
    for (method, encryption) in [("scram-sha-256", "scram-sha-256"), ("md5", "md5"), ("password", "scram-sha-256")] {
        let user = format!("u_{}", method.replace('-', "_"));
        lab.run(&format!(
            "set password_encryption = '{encryption}'; create role {user} login replication password 'pä ss'"
        ))
        .await?;
        require(&lab, method, &user).await?;
        let url = |password: &str| lab.postgres.url_as(&user, password, "postgres");
        connect(&url("p%C3%A4%20ss")).await.context(method)?;
        let error = connect(&url("wrong")).await.err().with_context(|| format!("{method} let a wrong password in"))?;
        assert_eq!(error.sqlstate(), Some(&SqlState::INVALID_PASSWORD), "{method}: {error}");
        let url = format!("postgres://{user}@127.0.0.1:{}/postgres", lab.postgres.port());
        let error = connect(&url).await.err().context("no password")?;
        assert!(matches!(error, SourceError::Auth(_)), "{error}");
    }
    Ok(())
}

#[tokio::test]
async fn a_unix_socket_is_a_host_too() -> Result<()> {
    let lab = Lab::start().await?;
    let directory = lab.postgres.data_dir().parent().context("directory")?.to_owned();
    let host = directory.to_string_lossy().replace('/', "%2F");
    let password = lab.postgres.url("postgres");
    let login = password.split("://").nth(1).and_then(|rest| rest.split('@').next()).context("login")?;
    connect(&format!("postgres://{login}@{host}:{}/postgres", lab.postgres.port())).await?;
    Ok(())
}

#[tokio::test]
async fn r_dec_1_the_session_settings_are_pinned() -> Result<()> {
    let lab = Lab::start().await?;
    lab.run("alter role postgres set timezone = 'Asia/Tokyo'; alter role postgres set bytea_output = 'escape'").await?;
    let url = SourceUrl::parse(&format!("{}?options=-c%20DateStyle%3DSQL", lab.postgres.url("postgres")))?;
    let sql = connect_sql(&url, "test", None, PATIENCE).await?;
    for (name, value) in [
        ("TimeZone", "UTC"),
        ("bytea_output", "hex"),
        ("DateStyle", "ISO, MDY"),
        ("IntervalStyle", "postgres"),
        ("extra_float_digits", "1"),
        ("search_path", ""),
        ("application_name", "test"),
    ] {
        let row = sql.query_one("select pg_catalog.current_setting($1)", &[&name]).await?;
        assert_eq!(row.get::<_, String>(0), value, "{name}");
    }
    Ok(())
}

#[tokio::test]
async fn a_server_that_says_nothing_is_given_up_in_time() -> Result<()> {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = SourceUrl::parse(&format!("postgres://u:secret@{}/d", silent.local_addr()?))?;
    let sockets = Sockets::new();
    let limit = Duration::from_millis(200);
    let error = ReplicationConnection::connect(&url, "test", &sockets, limit).await.err().context("connected")?;
    assert!(matches!(error, SourceError::Timeout { .. }) && error.is_connection_error());
    assert_eq!(sockets.open(), 0);
    let error = connect_sql(&url, "test", Some(&sockets), limit).await.err().context("connected")?;
    assert!(matches!(error, SourceError::Timeout { .. }) && !format!("{error:?}").contains("secret"));
    Ok(())
}

#[tokio::test]
async fn r_eng_5_shutdown_all_cuts_a_connection_that_is_being_opened() -> Result<()> {
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = SourceUrl::parse(&format!("postgres://u:secret@{}/d?sslmode=disable", silent.local_addr()?))?;
    let sockets = Sockets::new();
    let connecting = ReplicationConnection::connect(&url, "test", &sockets, PATIENCE);
    let (outcome, ()) = tokio::join!(connecting, async {
        let _accepted = silent.accept().await;
        sockets.shutdown_all();
    });
    assert!(outcome.err().context("connected")?.is_connection_error());
    Ok(())
}
