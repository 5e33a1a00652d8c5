use std::net::SocketAddr;

use anyhow::Result;
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

/// What the proxy does with connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Flow {
    /// Forwards.
    Open,
    /// Keeps connections and takes new ones, forwards nothing: a network that swallows packets.
    Frozen,
    /// Closes all connections and every new one at once.
    Cut,
}

/// A TCP proxy on loopback between us and a server; ends when dropped.
#[derive(Debug)]
pub struct TcpProxy {
    port: u16,
    flow: watch::Sender<Flow>,
    _stop: DropGuard,
}

impl TcpProxy {
    /// A proxy in front of a port of this machine, open.
    pub async fn start(target: u16) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let port = listener.local_addr()?.port();
        let (flow, watched) = watch::channel(Flow::Open);
        let stop = CancellationToken::new();
        let accepting = accept(listener, SocketAddr::from(([127, 0, 0, 1], target)), watched);
        tokio::spawn(stop.clone().run_until_cancelled_owned(accepting));
        Ok(Self { port, flow, _stop: stop.drop_guard() })
    }

    /// The proxy's own port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Changes what happens from now on.
    pub fn set(&self, flow: Flow) {
        self.flow.send_replace(flow);
    }
}

async fn accept(listener: TcpListener, target: SocketAddr, flow: watch::Receiver<Flow>) {
    let connections = TaskTracker::new();
    while let Ok((client, _)) = listener.accept().await {
        connections.spawn(connection(client, target, flow.clone()));
    }
}

async fn connection(client: TcpStream, target: SocketAddr, mut flow: watch::Receiver<Flow>) {
    let mut cut = flow.clone();
    let forwarding = async {
        // A new connection in the freeze hangs, too.
        flow.wait_for(|flow| *flow == Flow::Open).await.ok()?;
        let server = TcpStream::connect(target).await.ok()?;
        let ((client_read, client_write), (server_read, server_write)) = (client.into_split(), server.into_split());
        tokio::join!(pump(client_read, server_write, flow.clone()), pump(server_read, client_write, flow));
        Some(())
    };
    tokio::select! {
        // Also when the proxy is dropped.
        _ = cut.wait_for(|flow| *flow == Flow::Cut) => {}
        _ = forwarding => {}
    }
}

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut flow: watch::Receiver<Flow>) {
    let mut buffer = vec![0; 64 << 10];
    loop {
        if flow.wait_for(|flow| *flow == Flow::Open).await.is_err() {
            return;
        }
        let Ok(length @ 1..) = from.read(&mut buffer).await else { return };
        // What arrived in the freeze waits, too.
        if flow.wait_for(|flow| *flow == Flow::Open).await.is_err() || to.write_all(&buffer[..length]).await.is_err() {
            return;
        }
    }
}
