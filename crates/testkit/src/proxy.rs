use std::{
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
use rustix::net::sockopt::set_socket_linger;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
};
use tokio_util::{
    sync::{CancellationToken, DropGuard},
    task::TaskTracker,
};

/// What a client says first is kept up to this size: a start-up packet, also behind a request for TLS.
const OPENING: usize = 2048;

/// What the proxy does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Forwards.
    Open,
    /// Keeps connections and takes new ones, forwards nothing; what was sent meanwhile comes when it opens again.
    Frozen,
    /// Keeps connections and takes new ones, and swallows what is sent: a router that has forgotten the connection.
    Blackhole,
    /// Forwards, but tells neither side when the other has closed.
    Deaf,
    /// Closes all connections and every new one at once.
    Cut,
    /// The same with RST.
    Reset,
}

impl Flow {
    fn ends(self) -> bool {
        matches!(self, Self::Cut | Self::Reset)
    }
}

/// Chooses by what a client said first.
type Choice = Arc<dyn Fn(&str) -> bool + Send + Sync>;

/// A flow for everybody, or for those whom the choice takes in; all others are open.
#[derive(Clone)]
struct Rules {
    flow: Flow,
    choice: Option<Choice>,
    /// Only for connections with a lower number.
    before: u64,
}

impl Rules {
    fn flow(&self, opening: &Opening) -> Flow {
        match &self.choice {
            _ if opening.number >= self.before => Flow::Open,
            Some(choice) if !opening.is(&**choice) => Flow::Open,
            _ => self.flow,
        }
    }
}

/// A connection's number and its client's first bytes.
#[derive(Debug, Clone, Default)]
struct Opening {
    number: u64,
    said: Arc<Mutex<Vec<u8>>>,
}

impl Opening {
    fn add(&self, bytes: &[u8]) {
        let mut opening = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        let room = OPENING.saturating_sub(opening.len()).min(bytes.len());
        opening.extend_from_slice(&bytes[..room]);
    }

    /// False while the client has said nothing.
    fn is(&self, choice: &dyn Fn(&str) -> bool) -> bool {
        let opening = self.said.lock().unwrap_or_else(PoisonError::into_inner);
        !opening.is_empty() && choice(&String::from_utf8_lossy(&opening))
    }
}

/// A TCP proxy on loopback between us and a server; ends when dropped.
pub struct TcpProxy {
    port: u16,
    rules: watch::Sender<Rules>,
    accepted: Arc<AtomicU64>,
    _stop: DropGuard,
}

impl TcpProxy {
    /// A proxy in front of a port of this machine, open.
    pub async fn start(target: u16) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let (rules, watched) = watch::channel(Rules { flow: Flow::Open, choice: None, before: u64::MAX });
        let stop = CancellationToken::new();
        let accepted = Arc::new(AtomicU64::new(0));
        let target = SocketAddr::from(([127, 0, 0, 1], target));
        let accepting = accept(listener, target, watched, Arc::clone(&accepted));
        tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
        Ok(Self { port, rules, accepted, _stop: stop.drop_guard() })
    }

    /// The proxy's own port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes what happens to all connections from now on.
    pub fn set(&self, flow: Flow) {
        self.rules.send_replace(Rules { flow, choice: None, before: u64::MAX });
    }

    /// Changes what happens from now on to connections that are chosen by what their client said first; all others are
    /// open. PostgreSQL's start-up packet, unless it is encrypted, has `name\0value\0` pairs: the user, the database, the
    /// application name, and `replication` of those that stream. Statements come behind it.
    pub fn set_where(&self, flow: Flow, choice: impl Fn(&str) -> bool + Send + Sync + 'static) {
        self.rules.send_replace(Rules { flow, choice: Some(Arc::new(choice)), before: u64::MAX });
    }

    /// The same for the connections that are there now; whoever comes later gets through.
    pub fn set_present(&self, flow: Flow, choice: impl Fn(&str) -> bool + Send + Sync + 'static) {
        let before = self.accepted.load(Ordering::SeqCst);
        self.rules.send_replace(Rules { flow, choice: Some(Arc::new(choice)), before });
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, rules: watch::Receiver<Rules>, accepted: Arc<AtomicU64>) {
    let connections = TaskTracker::new();
    while let Ok((client, _)) = listener.accept().await {
        let opening = Opening { number: accepted.fetch_add(1, Ordering::SeqCst), ..Opening::default() };
        connections.spawn(connection(client, target, rules.clone(), opening));
    }
}

async fn connection(client: TcpStream, target: SocketAddr, rules: watch::Receiver<Rules>, opening: Opening) {
    let mut gate = Gate { rules, opening: opening.clone(), opens: None };
    let mut end = gate.clone();
    // A new connection in the freeze hangs, too.
    let server = tokio::select! {
        _ = end.wait(Flow::ends) => None,
        _ = gate.wait(|flow| flow != Flow::Frozen) => TcpStream::connect(target).await.ok(),
    };
    let Some(server) = server else { return close(end.flow(), [&client]) };
    let ((mut client_read, mut client_write), (mut server_read, mut server_write)) =
        (client.into_split(), server.into_split());
    let forth = Gate { opens: Some(opening), ..gate.clone() };
    let both = async {
        tokio::join!(pump(&mut client_read, &mut server_write, forth), pump(&mut server_read, &mut client_write, gate))
    };
    tokio::select! {
        // Also when the proxy is dropped.
        _ = end.wait(Flow::ends) => {}
        _ = both => {}
    }
    close(end.flow(), [client_read.as_ref(), server_read.as_ref()]);
    // Dropping them would say goodbye before the reset.
    client_write.forget();
    server_write.forget();
}

/// The sockets close when they are dropped; the linger time decides how.
fn close<const N: usize>(flow: Flow, sockets: [&TcpStream; N]) {
    if flow == Flow::Reset {
        for socket in sockets {
            let _ = set_socket_linger(socket, Some(Duration::ZERO));
        }
    }
}

/// What may pass, of one direction of a connection.
#[derive(Clone)]
struct Gate {
    rules: watch::Receiver<Rules>,
    opening: Opening,
    /// Of the client's direction: where its first words go.
    opens: Option<Opening>,
}

impl Gate {
    fn flow(&self) -> Flow {
        self.rules.borrow().flow(&self.opening)
    }

    /// Waits until the flow is as wanted; an error when the proxy is gone.
    async fn wait(&mut self, wanted: impl Fn(Flow) -> bool) -> Result<Flow> {
        let opening = self.opening.clone();
        let rules = self.rules.wait_for(|rules| wanted(rules.flow(&opening))).await?;
        Ok(rules.flow(&opening))
    }

    /// Waits while frozen.
    async fn pass(&mut self) -> Result<Flow> {
        self.wait(|flow| flow != Flow::Frozen).await
    }
}

/// Forwards until one side ends; the other learns of it once the proxy isn't deaf.
async fn pump(from: &mut OwnedReadHalf, to: &mut OwnedWriteHalf, mut gate: Gate) -> Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        gate.pass().await?;
        let Ok(length @ 1..) = from.read(&mut buffer).await else { break };
        if let Some(opening) = &gate.opens {
            opening.add(&buffer[..length]);
        }
        // What arrived in the freeze waits, too.
        if gate.pass().await? != Flow::Blackhole && to.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
    gate.wait(|flow| !matches!(flow, Flow::Deaf | Flow::Blackhole | Flow::Frozen)).await?;
    Ok(to.shutdown().await?)
}
