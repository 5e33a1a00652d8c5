//! A client that holds a slot and does no work: it reads nothing and says every now and then that it is alive, as the
//! keep-alive thread of an engine whose reader hangs.

use std::{
    convert::Infallible,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpStream},
    sync::mpsc::{self, RecvTimeoutError},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use bytes::{BufMut, BytesMut};
use fallible_iterator::FallibleIterator;
use postgres_protocol::{
    authentication::sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    message::{backend::Message, frontend},
};
use socket2::{Domain, Socket, Type};

use crate::template::PASSWORD;

/// So small that the server blocks writing after a few kilobytes.
const RECEIVE_BUFFER: usize = 4096;
/// Limit of every step of connecting.
const PATIENCE: Duration = Duration::from_secs(30);
/// Between two signs of life.
const PERIOD: Duration = Duration::from_millis(100);

/// As whom to hold which slot.
#[derive(Debug, Clone)]
pub struct SquatterOptions {
    /// Port of the server, or of a proxy before it.
    pub port: u16,
    /// Role and password; `None` = the superuser.
    pub login: Option<(String, String)>,
    /// The slot's database.
    pub database: String,
    /// The slot.
    pub slot: String,
    /// `application_name`.
    pub application_name: String,
    /// Options of the output plugin.
    pub plugin_options: Vec<(String, String)>,
}

/// The client; it leaves when dropped.
#[derive(Debug)]
pub struct Squatter {
    socket: TcpStream,
    stop: Option<mpsc::Sender<Infallible>>,
    thread: Option<JoinHandle<()>>,
}

impl Squatter {
    /// Starts to stream from the slot's confirmed position, and reads nothing from then on.
    pub async fn start(options: SquatterOptions) -> Result<Self> {
        tokio::task::spawn_blocking(move || Self::start_blocking(&options)).await?
    }

    fn start_blocking(options: &SquatterOptions) -> Result<Self> {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        socket.set_recv_buffer_size(RECEIVE_BUFFER)?;
        socket.connect(&SocketAddr::from(([127, 0, 0, 1], options.port)).into())?;
        let mut wire = Wire { socket: socket.into(), input: BytesMut::new() };
        wire.socket.set_read_timeout(Some(PATIENCE))?;
        wire.log_in(options)?;
        wire.stream(options)?;
        let mut writer = wire.socket.try_clone()?;
        let (stop, stopped) = mpsc::channel::<Infallible>();
        let thread = std::thread::spawn(move || {
            while writer.write_all(&status()).is_ok() {
                if stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        Ok(Self { socket: wire.socket, stop: Some(stop), thread: Some(thread) })
    }

    /// Whether it could still say that it is alive, the last time it tried.
    pub fn is_connected(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}

impl Drop for Squatter {
    fn drop(&mut self) {
        self.stop.take();
        let _ = self.socket.shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A standby status that has flushed nothing: `flush_lsn` stays NULL.
fn status() -> BytesMut {
    let mut message = BytesMut::new();
    message.put_u8(b'd');
    message.put_i32(4 + 1 + 3 * 8 + 8 + 1);
    message.put_u8(b'r');
    message.put_bytes(0, 3 * 8 + 8 + 1);
    message
}

struct Wire {
    socket: TcpStream,
    input: BytesMut,
}

impl Wire {
    fn log_in(&mut self, options: &SquatterOptions) -> Result<()> {
        let superuser = || ("postgres", PASSWORD);
        let (user, password) =
            options.login.as_ref().map_or_else(superuser, |(user, password)| (user.as_str(), password.as_str()));
        let parameters = [
            ("user", user),
            ("database", options.database.as_str()),
            ("replication", "database"),
            ("application_name", options.application_name.as_str()),
        ];
        self.send(|out| frontend::startup_message(parameters, out))?;
        let Message::AuthenticationSasl(_) = self.message()? else { bail!("the server doesn't want SCRAM") };
        let mut scram = ScramSha256::new(password.as_bytes(), ChannelBinding::unsupported());
        self.send(|out| frontend::sasl_initial_response(SCRAM_SHA_256, scram.message(), out))?;
        let Message::AuthenticationSaslContinue(body) = self.message()? else { bail!("SCRAM broke off") };
        scram.update(body.data())?;
        self.send(|out| frontend::sasl_response(scram.message(), out))?;
        while !matches!(self.message()?, Message::ReadyForQuery(_)) {}
        Ok(())
    }

    fn stream(&mut self, options: &SquatterOptions) -> Result<()> {
        let plugin: Vec<_> =
            options.plugin_options.iter().map(|(name, value)| format!("\"{name}\" '{value}'")).collect();
        let plugin = if plugin.is_empty() { String::new() } else { format!(" ({})", plugin.join(", ")) };
        let command = format!("START_REPLICATION SLOT \"{}\" LOGICAL 0/0{plugin}", options.slot);
        self.send(|out| frontend::query(&command, out))?;
        // CopyBothResponse, which the library doesn't know: anything that can't be read and isn't an error.
        loop {
            if self.input.first() == Some(&b'W') {
                return Ok(());
            }
            if !self.input.is_empty() {
                self.message()?;
            } else {
                self.fill()?;
            }
        }
    }

    fn send(&mut self, write: impl FnOnce(&mut BytesMut) -> std::io::Result<()>) -> Result<()> {
        let mut out = BytesMut::new();
        write(&mut out)?;
        Ok(self.socket.write_all(&out)?)
    }

    fn message(&mut self) -> Result<Message> {
        loop {
            match Message::parse(&mut self.input)? {
                Some(Message::ErrorResponse(body)) => {
                    let text = |field: &[u8]| String::from_utf8_lossy(field).into_owned();
                    let fields: Vec<String> = body.fields().map(|field| Ok(text(field.value_bytes()))).collect()?;
                    bail!("the server refuses: {fields:?}");
                }
                Some(message) => return Ok(message),
                None => self.fill()?,
            }
        }
    }

    fn fill(&mut self) -> Result<()> {
        let mut buffer = [0; 4096];
        let length = self.socket.read(&mut buffer).context("the server doesn't answer")?;
        if length == 0 {
            bail!("the server has closed the connection");
        }
        self.input.extend_from_slice(&buffer[..length]);
        Ok(())
    }
}
