use std::time::{Duration, SystemTime};

use aura_domain::Lsn;
use bytes::{Buf, BufMut, Bytes, BytesMut};
use postgres_protocol::message::{backend, frontend};

use super::wire::{self, HEADER, Wire, timed};
use crate::SourceError;

/// A status that can't be written for this long means that the server is gone.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Tag, start, end and send time of XLogData.
const XLOG_HEADER: usize = 1 + 8 + 8 + 8;
/// Largest row that is read into memory unless [`ReplicationStream::set_max_message`] says otherwise.
const MAX_MESSAGE: usize = 64 * 1024 * 1024;
/// What is kept of a longer one: enough to see whose row it was.
const PREFIX: usize = 1024;
/// Microseconds from 1970 to 2000, PostgreSQL's epoch.
const POSTGRES_EPOCH_US: i64 = 946_684_800_000_000;

/// A running logical stream. Nothing is read unless asked, so not calling [`ReplicationStream::next`] is the
/// backpressure; statuses are sent only by [`ReplicationStream::send_status`] (R-FB-1).
pub struct ReplicationStream {
    wire: Wire,
    max_message: usize,
    oversize: Option<Oversize>,
    ended: bool,
}

struct Oversize {
    message: StreamMessage,
    remaining: usize,
}

/// A message of the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StreamMessage {
    /// XLogData.
    Data {
        /// Start of the record; of a row, the change LSN of its position (R-LSN-6).
        start: Lsn,
        /// The header's second position. A logical walsender says `start` again, so it tells nothing about the server's
        /// WAL end; only keepalives do.
        end: Lsn,
        /// What the plugin wrote.
        payload: Bytes,
    },
    /// A message over the limit, which was discarded while it was read (R-DEC-4).
    Oversize {
        /// Start of the record.
        start: Lsn,
        /// Size of the plugin's message in bytes.
        bytes: usize,
        /// Its first 1024 bytes, for [`Decoder::oversize`](crate::Decoder::oversize).
        prefix: Bytes,
    },
    /// The server's position; may be confirmed only when nothing is in flight (R-LSN-2).
    Keepalive {
        /// The server's WAL end.
        end: Lsn,
        /// The server wants a status at once.
        reply_requested: bool,
    },
    /// The server ended the stream (CopyDone): it is shutting down, or answers ours.
    End,
}

/// A standby status update.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Status {
    /// Received.
    pub written: Lsn,
    /// Durable: what the slot's confirmed position becomes.
    pub flushed: Lsn,
    /// Applied.
    pub applied: Lsn,
    /// Ask for a keepalive, as a proof of life.
    pub reply_requested: bool,
}

impl ReplicationStream {
    pub(super) fn new(wire: Wire) -> Self {
        Self { wire, max_message: MAX_MESSAGE, oversize: None, ended: false }
    }

    /// Sets the largest message, in bytes, that is read into memory; the default is 64 MiB.
    pub fn set_max_message(&mut self, bytes: usize) {
        self.max_message = bytes.max(PREFIX);
    }

    /// The next message. Cancel-safe; the payload shares the read buffer. Without a limit of its own: an idle server
    /// may be silent for half of `wal_sender_timeout`, and decoding a large transaction takes longer still.
    pub async fn next(&mut self) -> Result<StreamMessage, SourceError> {
        loop {
            if let Some(message) = self.buffered() {
                return message;
            }
            let missing = self.missing();
            self.wire.fill(missing).await?;
        }
    }

    /// The next message that is in memory already, without an await. Drain it between two selects.
    pub fn buffered(&mut self) -> Option<Result<StreamMessage, SourceError>> {
        self.take().transpose()
    }

    /// Sends a status at once. Cancel-safe: what could not be written is sent before the next one.
    pub async fn send_status(&mut self, status: Status) -> Result<(), SourceError> {
        let mut body = BytesMut::with_capacity(34);
        body.put_u8(b'r');
        body.put_u64(status.written.0);
        body.put_u64(status.flushed.0);
        body.put_u64(status.applied.0);
        body.put_i64(postgres_now());
        body.put_u8(u8::from(status.reply_requested));
        let frame = frontend::CopyData::new(body.freeze());
        frame.map_err(|_| SourceError::Protocol("a status is too long"))?.write(&mut self.wire.output);
        self.flush().await
    }

    /// Asks the server to end the stream. Inside a large transaction it first sends the rest of it: read on until
    /// [`StreamMessage::End`], or just drop the stream.
    pub async fn copy_done(&mut self) -> Result<(), SourceError> {
        frontend::copy_done(&mut self.wire.output);
        self.flush().await
    }

    /// Terminate and close, within a quarter of a second.
    pub async fn close(self) {
        self.wire.close().await;
    }

    async fn flush(&mut self) -> Result<(), SourceError> {
        timed("sending a status", WRITE_TIMEOUT, self.wire.flush()).await
    }

    /// How many bytes of the frame at hand are still to come, as far as they will be kept.
    fn missing(&self) -> usize {
        match self.wire.header() {
            Ok(Some((_, size))) if size <= self.frame_limit() => size.saturating_sub(self.wire.input.len()),
            _ => HEADER,
        }
    }

    fn frame_limit(&self) -> usize {
        self.max_message.saturating_add(HEADER + XLOG_HEADER)
    }

    fn take(&mut self) -> Result<Option<StreamMessage>, SourceError> {
        loop {
            if self.oversize.is_some() {
                return Ok(self.discard());
            }
            let Some((tag, size)) = self.wire.header()? else { return Ok(None) };
            if size > self.frame_limit() {
                if !self.begin_discard(tag, size)? {
                    return Ok(None);
                }
                continue;
            }
            if self.wire.input.len() < size {
                return Ok(None);
            }
            let frame = self.wire.input.split_to(size);
            if let Some(message) = self.interpret(tag, frame)? {
                return Ok(Some(message));
            }
        }
    }

    fn interpret(&mut self, tag: u8, frame: BytesMut) -> Result<Option<StreamMessage>, SourceError> {
        match tag {
            backend::COPY_DATA_TAG => copy_data(frame.freeze().slice(HEADER..)),
            backend::COPY_DONE_TAG if !self.ended => {
                self.ended = true;
                Ok(Some(StreamMessage::End))
            }
            // What follows the end, and notices: wal2json warns of rows without identity by NOTICE.
            _ => wire::parse(frame).map(|_| None),
        }
    }

    /// Starts to pass over a frame that is too long, once its beginning is here.
    fn begin_discard(&mut self, tag: u8, size: usize) -> Result<bool, SourceError> {
        if tag != backend::COPY_DATA_TAG {
            return Err(SourceError::Protocol("a message is too long"));
        }
        if self.wire.input.len() < HEADER + XLOG_HEADER + PREFIX {
            return Ok(false);
        }
        let head = self.wire.input.split_to(HEADER + XLOG_HEADER + PREFIX).freeze().slice(HEADER..);
        let Some(StreamMessage::Data { start, payload: prefix, .. }) = copy_data(head)? else {
            return Err(SourceError::Protocol("a message is too long"));
        };
        let bytes = size - HEADER - XLOG_HEADER;
        let message = StreamMessage::Oversize { start, bytes, prefix };
        self.oversize = Some(Oversize { message, remaining: bytes - PREFIX });
        Ok(true)
    }

    fn discard(&mut self) -> Option<StreamMessage> {
        let oversize = self.oversize.as_mut()?;
        let here = oversize.remaining.min(self.wire.input.len());
        self.wire.input.advance(here);
        oversize.remaining -= here;
        if oversize.remaining > 0 { None } else { self.oversize.take().map(|oversize| oversize.message) }
    }
}

fn copy_data(mut body: Bytes) -> Result<Option<StreamMessage>, SourceError> {
    let short = SourceError::Protocol("a stream message is too short");
    match body.first() {
        Some(b'w') if body.len() >= XLOG_HEADER => {
            body.advance(1);
            let (start, end) = (Lsn(body.get_u64()), Lsn(body.get_u64()));
            body.advance(8);
            Ok(Some(StreamMessage::Data { start, end, payload: body }))
        }
        Some(b'k') if body.len() >= 18 => {
            body.advance(1);
            let end = Lsn(body.get_u64());
            body.advance(8);
            Ok(Some(StreamMessage::Keepalive { end, reply_requested: body.get_u8() != 0 }))
        }
        Some(b'w' | b'k') | None => Err(short),
        Some(_) => Ok(None),
    }
}

fn postgres_now() -> i64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_micros()).unwrap_or(i64::MAX) - POSTGRES_EPOCH_US
}
