//! One connection that stays open, so that a request costs what the server needs for it.

use anyhow::{Context, Result};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

pub(super) struct Client {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub(super) async fn connect(port: u16) -> Result<Self> {
        let stream = TcpStream::connect(("127.0.0.1", port)).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// Status and body.
    pub(super) async fn request(
        &mut self,
        method: &str,
        path: &str,
        key: &str,
        body: Option<&str>,
    ) -> Result<(u16, String)> {
        let body = body.unwrap_or_default();
        let length = body.len();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nhost: localhost\r\napikey: {key}\r\nprefer: wait=30\r\n\
             content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        self.stream.write_all(request.as_bytes()).await?;
        let head = loop {
            if let Some(end) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                break self.buffer.drain(..end + 4).collect::<Vec<_>>();
            }
            self.more().await?;
        };
        let head = String::from_utf8(head)?.to_ascii_lowercase();
        let status = head.split_whitespace().nth(1).context("no status")?.parse()?;
        let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
        let length: usize = length.context("no length")?.trim().parse()?;
        while self.buffer.len() < length {
            self.more().await?;
        }
        Ok((status, String::from_utf8(self.buffer.drain(..length).collect())?))
    }

    async fn more(&mut self) -> Result<()> {
        let read = self.stream.read_buf(&mut self.buffer).await?;
        anyhow::ensure!(read > 0, "the server closes");
        Ok(())
    }
}
