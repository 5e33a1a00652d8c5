use std::time::Duration;

use anyhow::{Context, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// Longer than any handler takes.
const LIMIT: Duration = Duration::from_secs(15);

/// Status and body that a GET on loopback answers.
pub async fn http_get(port: u16, path: &str) -> Result<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).await?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await?;
        anyhow::Ok(answer)
    };
    let answer = timeout(LIMIT, exchange).await??;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Ok((status.with_context(|| format!("no status in {answer:?}"))?, body.to_owned()))
}

/// The status that a GET on loopback answers.
pub async fn http_status(port: u16, path: &str) -> Result<u16> {
    Ok(http_get(port, path).await?.0)
}
