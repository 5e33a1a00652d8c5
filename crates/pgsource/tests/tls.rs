use std::{os::unix::fs::MetadataExt, path::Path, process::Stdio};

use anyhow::{Context, Result, ensure};
use aura_pgsource::{ReplicationConnection, Sockets, SourceError, SourceUrl, connect_sql};

use crate::lab::{Lab, PATIENCE};

async fn openssl(directory: &Path, arguments: &str) -> Result<()> {
    let mut command = tokio::process::Command::new("openssl");
    let status = command.args(arguments.split(' ')).current_dir(directory).stderr(Stdio::null()).status().await?;
    ensure!(status.success(), "openssl {arguments}");
    Ok(())
}

/// An authority and a certificate of `localhost`, in the server's data directory.
async fn certificates(data: &Path) -> Result<()> {
    let key = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes";
    openssl(data, &format!("req -x509 {key} -keyout ca.key -out ca.crt -days 2 -subj /CN=authority")).await?;
    openssl(data, &format!("req -new {key} -keyout server.key -out server.csr -subj /CN=localhost")).await?;
    tokio::fs::write(data.join("names"), "subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n").await?;
    let sign =
        "x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -out server.crt -days 2 -extfile names";
    openssl(data, sign).await?;
    let owner = tokio::fs::metadata(data).await?;
    for file in ["server.key", "server.crt"] {
        std::os::unix::fs::chown(data.join(file), Some(owner.uid()), Some(owner.gid()))?;
    }
    Ok(())
}

async fn with_tls() -> Result<Lab> {
    let lab = Lab::start().await?;
    certificates(&lab.postgres.data_dir()).await?;
    lab.run("alter system set ssl = on").await?;
    lab.run("select pg_reload_conf()").await?;
    let url = format!("{}?sslmode=require", lab.postgres.url("postgres"));
    aura_testkit::eventually(PATIENCE, || async { connect(&url).await.is_ok() }).await?;
    Ok(lab)
}

/// Whether both kinds of connection are encrypted.
async fn connect(url: &str) -> Result<bool, SourceError> {
    let url = SourceUrl::parse(url)?;
    let connection = ReplicationConnection::connect(&url, "test", &Sockets::new(), PATIENCE).await?;
    let sql = connect_sql(&url, "test", None, PATIENCE).await?;
    let encrypted = "select ssl from pg_catalog.pg_stat_ssl where pid = $1";
    let walsender: bool = sql.query_one(encrypted, &[&connection.pid()]).await?.get(0);
    let ours = "select ssl from pg_catalog.pg_stat_ssl where pid = pg_catalog.pg_backend_pid()";
    let ours: bool = sql.query_one(ours, &[]).await?.get(0);
    connection.close().await;
    assert_eq!(walsender, ours);
    Ok(ours)
}

#[tokio::test]
async fn sslmode_means_what_it_means_in_libpq() -> Result<()> {
    let lab = with_tls().await?;
    let base = lab.postgres.url("postgres").replace("127.0.0.1", "localhost");
    let by_address = lab.postgres.url("postgres");
    let authority = lab.postgres.data_dir().join("ca.crt");
    let authority = authority.to_string_lossy().replace('/', "%2F");
    assert!(!connect(&format!("{base}?sslmode=disable")).await?);
    assert!(connect(&base).await?, "prefer is the default");
    assert!(connect(&format!("{base}?sslmode=require")).await?);
    assert!(connect(&format!("{base}?sslmode=verify-full&sslrootcert={authority}")).await?);
    let unknown = connect(&format!("{base}?sslmode=verify-full")).await.err().context("an unknown authority")?;
    assert!(matches!(unknown, SourceError::Tls(_)), "{unknown}");
    let other_name = connect(&format!("{by_address}?sslmode=verify-full&sslrootcert={authority}")).await;
    assert!(matches!(other_name, Err(SourceError::Tls(_))), "the certificate is not for the address");
    Ok(())
}

#[tokio::test]
async fn a_server_without_tls_is_refused_when_it_is_required() -> Result<()> {
    let lab = Lab::start().await?;
    let base = lab.postgres.url("postgres");
    assert!(!connect(&base).await?);
    let refused = connect(&format!("{base}?sslmode=require")).await;
    assert!(matches!(refused, Err(SourceError::Tls(_))));
    Ok(())
}
