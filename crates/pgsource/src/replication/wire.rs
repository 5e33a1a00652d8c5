use std::{future::Future, time::Duration};

use bytes::{Buf, BytesMut};
use postgres_protocol::message::{
    backend::{self, Message},
    frontend,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::{SourceError, transport::Transport};

/// Bytes asked of the socket at a time.
pub(super) const READ_BYTES: usize = 64 * 1024;
/// Largest message outside the stream: answers to our few commands are far below.
const MAX_MESSAGE: usize = 1024 * 1024;
/// Tag of CopyBothResponse, which `postgres-protocol` doesn't know.
const COPY_BOTH_TAG: u8 = b'W';
/// Tag and length.
pub(super) const HEADER: usize = 5;
const GOODBYE: Duration = Duration::from_millis(250);

/// Framing over the transport. Both directions are buffered here, so that every future of this type may be dropped at
/// an await and taken up again: a half-read frame stays in `input`, a half-written one in `output`.
pub(super) struct Wire {
    transport: Transport,
    pub(super) input: BytesMut,
    pub(super) output: BytesMut,
}

impl Wire {
    pub(super) fn new(transport: Transport) -> Self {
        Self { transport, input: super::buffer(), output: BytesMut::new() }
    }

    /// Writes what is buffered.
    pub(super) async fn flush(&mut self) -> Result<(), SourceError> {
        while self.output.has_remaining() {
            match self.transport.write_buf(&mut self.output).await.map_err(SourceError::io("write"))? {
                0 => return Err(SourceError::Closed),
                _ => continue,
            }
        }
        self.transport.flush().await.map_err(SourceError::io("write"))
    }

    /// Reads once; `expected` is how much is known to be missing.
    pub(super) async fn fill(&mut self, expected: usize) -> Result<(), SourceError> {
        if self.input.capacity() - self.input.len() < expected.max(READ_BYTES / 8) {
            self.input.reserve(expected.max(READ_BYTES));
        }
        match self.transport.read_buf(&mut self.input).await.map_err(SourceError::io("read"))? {
            0 => Err(SourceError::Closed),
            _ => Ok(()),
        }
    }

    /// Tag and total size of the next frame, once its header is here.
    pub(super) fn header(&self) -> Result<Option<(u8, usize)>, SourceError> {
        let bad = |_| SourceError::Protocol("bad message length");
        let Some(header) = backend::Header::parse(&self.input).map_err(bad)? else { return Ok(None) };
        let size = usize::try_from(header.len()).map_err(|_| SourceError::Protocol("bad message length"))?;
        Ok(Some((header.tag(), size + 1)))
    }

    /// The next whole frame outside the stream, header included.
    async fn frame(&mut self) -> Result<(u8, BytesMut), SourceError> {
        loop {
            match self.header()? {
                Some((_, size)) if size > MAX_MESSAGE => return Err(SourceError::Protocol("a message is too long")),
                Some((tag, size)) if self.input.len() >= size => return Ok((tag, self.input.split_to(size))),
                Some((_, size)) => self.fill(size - self.input.len()).await?,
                None => self.fill(HEADER).await?,
            }
        }
    }

    /// The next message that says something: notices and parameters are passed over, errors are errors.
    pub(super) async fn message(&mut self) -> Result<Message, SourceError> {
        loop {
            let (_, frame) = self.frame().await?;
            match parse(frame)? {
                Message::NoticeResponse(_) | Message::ParameterStatus(_) => {}
                message => return Ok(message),
            }
        }
    }

    /// Sends the command in `output` and waits until the server streams.
    pub(super) async fn await_copy_both(&mut self) -> Result<(), SourceError> {
        self.flush().await?;
        loop {
            let (tag, frame) = self.frame().await?;
            if tag == COPY_BOTH_TAG {
                return Ok(());
            }
            match parse(frame)? {
                Message::NoticeResponse(_) | Message::ParameterStatus(_) => {}
                _ => return Err(SourceError::Protocol("unexpected message before the stream")),
            }
        }
    }

    /// Terminate and close; the peer gets a short time to take it.
    pub(super) async fn close(mut self) {
        frontend::terminate(&mut self.output);
        let goodbye = async {
            let _ = self.flush().await;
            let _ = self.transport.shutdown().await;
        };
        let _ = tokio::time::timeout(GOODBYE, goodbye).await;
    }
}

/// Parses a whole frame; an error response becomes the error.
pub(super) fn parse(mut frame: BytesMut) -> Result<Message, SourceError> {
    match Message::parse(&mut frame) {
        Ok(Some(Message::ErrorResponse(body))) => Err(SourceError::response(&body)),
        Ok(Some(message)) => Ok(message),
        Ok(None) | Err(_) => Err(SourceError::Protocol("a message can't be read")),
    }
}

/// Bounds a step.
pub(super) async fn timed<T>(
    what: &'static str,
    limit: Duration,
    step: impl Future<Output = Result<T, SourceError>>,
) -> Result<T, SourceError> {
    tokio::time::timeout(limit, step).await.map_err(|_| SourceError::Timeout { what, limit })?
}
