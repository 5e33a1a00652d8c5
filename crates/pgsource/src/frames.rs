//! What a server sends, held within bounds. Tenants' code may raise notices and errors of up to a gigabyte, and the
//! library would hold each whole, and write notices to our log.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Longer errors are cut. The severity and the code come first in one.
const ERROR_LIMIT: usize = 16 << 10;
/// No answer that anybody here asks for is longer.
const ANSWER_LIMIT: usize = 64 << 20;
/// Read at a time.
const CHUNK: usize = 16 << 10;
/// Kind, and the length of itself and what follows.
const HEADER: usize = 5;

/// A stream of messages of PostgreSQL's protocol without notices, and with errors cut.
pub(crate) struct Frames<S> {
    stream: S,
    /// Read, and not looked at yet.
    raw: BytesMut,
    /// Looked at, for the reader.
    out: Bytes,
    rest: Rest,
}

/// What becomes of the message that has begun.
enum Rest {
    /// None has begun.
    Header,
    Pass(usize),
    Skip(usize),
}

impl<S> Frames<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, raw: BytesMut::new(), out: Bytes::new(), rest: Rest::Header }
    }

    /// Looks at what was read; false: more must be read first.
    fn step(&mut self) -> io::Result<bool> {
        match self.rest {
            Rest::Header => return self.header(),
            Rest::Pass(_) | Rest::Skip(_) if self.raw.is_empty() => return Ok(false),
            Rest::Pass(left) => {
                self.out = self.raw.split_to(left.min(self.raw.len())).freeze();
                self.rest = if self.out.len() < left { Rest::Pass(left - self.out.len()) } else { Rest::Header };
            }
            Rest::Skip(left) => {
                let skipped = left.min(self.raw.len());
                self.raw.advance(skipped);
                self.rest = if skipped < left { Rest::Skip(left - skipped) } else { Rest::Header };
            }
        }
        Ok(true)
    }

    fn header(&mut self) -> io::Result<bool> {
        let Some((kind, length)) = self.raw.first().zip(self.raw.get(1..HEADER)) else { return Ok(false) };
        let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)) + 1;
        match kind {
            b'N' => self.rest = Rest::Skip(length),
            b'E' if length > ERROR_LIMIT => {
                if self.raw.len() < ERROR_LIMIT {
                    return Ok(false);
                }
                self.out = cut(&self.raw[HEADER..ERROR_LIMIT]);
                self.rest = Rest::Skip(length);
            }
            _ if !(HEADER..=ANSWER_LIMIT).contains(&length) => {
                return Err(io::Error::new(io::ErrorKind::InvalidData, "a message of impossible length"));
            }
            _ => self.rest = Rest::Pass(length),
        }
        Ok(true)
    }
}

/// The fields of an error as far as they are whole, and what there is of the next.
fn cut(body: &[u8]) -> Bytes {
    let mut fields = BytesMut::new();
    for field in body.split_inclusive(|byte| *byte == 0) {
        match field {
            [0] => break,
            [.., 0] => fields.put_slice(field),
            [kind, text @ ..] => {
                // Not in the middle of a character.
                let text = text.utf8_chunks().next().map_or("", |chunk| chunk.valid());
                fields.put_u8(*kind);
                fields.put_slice(text.as_bytes());
                fields.put_u8(0);
            }
            [] => {}
        }
    }
    let mut message = BytesMut::with_capacity(fields.len() + HEADER + 1);
    message.put_u8(b'E');
    message.put_u32(u32::try_from(fields.len() + HEADER).expect("shorter than the limit"));
    message.put(fields);
    message.put_u8(0);
    message.freeze()
}

impl<S: AsyncRead + Unpin> AsyncRead for Frames<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        loop {
            if !this.out.is_empty() {
                let part = this.out.split_to(this.out.len().min(buf.remaining()));
                buf.put_slice(&part);
                return Poll::Ready(Ok(()));
            }
            if this.step()? {
                continue;
            }
            let mut chunk = [0; CHUNK];
            let mut read = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.stream).poll_read(cx, &mut read))?;
            if read.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.raw.extend_from_slice(read.filled());
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Frames<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};
    use tokio::io::AsyncReadExt;

    use super::*;

    fn message(kind: u8, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(body.len() + 4).expect("short");
        [&[kind], length.to_be_bytes().as_slice(), body].concat()
    }

    /// Reads all through a stream whose pieces have these sizes.
    fn through(sent: &[u8], pieces: &[usize]) -> io::Result<Vec<u8>> {
        let mut stream = pieces_of(sent, pieces);
        let mut got = Vec::new();
        futures_util::FutureExt::now_or_never(stream.read_to_end(&mut got)).expect("never waits").map(|_| got)
    }

    fn pieces_of<'a>(sent: &'a [u8], pieces: &'a [usize]) -> Frames<Pieces<'a>> {
        Frames::new(Pieces { sent, pieces: pieces.iter().cycle() })
    }

    struct Pieces<'a> {
        sent: &'a [u8],
        pieces: std::iter::Cycle<std::slice::Iter<'a, usize>>,
    }

    impl AsyncRead for Pieces<'_> {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let next = self.pieces.next().copied().unwrap_or(1).min(self.sent.len()).min(buf.remaining());
            let (now, later) = self.sent.split_at(next);
            buf.put_slice(now);
            self.sent = later;
            Poll::Ready(Ok(()))
        }
    }

    proptest! {
        #[test]
        fn all_but_notices_pass_unchanged(
            messages in vec((prop::sample::select(b"DNETZ".to_vec()), vec(any::<u8>(), 0..200)), 0..20),
            pieces in vec(1..300_usize, 1..10),
        ) {
            let all: Vec<u8> = messages.iter().flat_map(|(kind, body)| message(*kind, body)).collect();
            let wanted = messages.iter().filter(|(kind, _)| *kind != b'N');
            let wanted: Vec<u8> = wanted.flat_map(|(kind, body)| message(*kind, body)).collect();
            prop_assert_eq!(through(&all, &pieces).expect("readable"), wanted);
        }
    }

    #[test]
    fn r_rls_9_a_long_error_keeps_its_code_and_ends_with_a_whole_character() -> io::Result<()> {
        let body =
            [b"SERROR\0VERROR\0C22012\0M".as_slice(), "é".repeat(ERROR_LIMIT).as_bytes(), b"\0Hhint\0\0"].concat();
        let sent = [message(b'E', &body), message(b'Z', b"I")].concat();
        let got = through(&sent, &[1000])?;
        let (error, rest) = got.split_at(got.len() - 6);
        assert_eq!(rest, message(b'Z', b"I"), "what follows is whole");
        let text = std::str::from_utf8(&error[HEADER..]).expect("whole characters");
        assert!(text.starts_with("SERROR\0VERROR\0C22012\0Méé") && text.ends_with("é\0\0"));
        assert_eq!(error, message(b'E', &error[HEADER..]), "its length is right");
        assert!(error.len() <= ERROR_LIMIT + 2);
        Ok(())
    }

    #[test]
    fn what_nobody_asked_for_is_refused() {
        let huge = [b"D".as_slice(), &u32::MAX.to_be_bytes()].concat();
        assert!(through(&huge, &[7]).is_err());
        assert!(through(b"D\0\0\0\x01", &[7]).is_err(), "shorter than its own length");
    }
}
