use std::{
    collections::HashMap,
    fmt,
    net::Shutdown,
    os::fd::AsFd,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use socket2::Socket;
use tokio::sync::watch;

use crate::SourceError;

/// The sockets of one engine (R-ENG-5). Each is registered before it is opened, so that [`Sockets::shutdown_all`] can
/// cut every connection from outside, whatever the task that uses it is stuck in. One value per engine run: once shut,
/// it refuses new connections for good. Clones are handles on the same registry.
#[derive(Clone, Default)]
pub struct Sockets(Arc<Registry>);

struct Registry {
    // Held for a map operation or non-blocking system calls only, never across an await.
    state: Mutex<State>,
    open: watch::Sender<usize>,
}

#[derive(Default)]
struct State {
    shut: bool,
    next: u64,
    live: HashMap<u64, Socket>,
}

impl Default for Registry {
    fn default() -> Self {
        Self { state: Mutex::default(), open: watch::Sender::new(0) }
    }
}

impl Sockets {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    /// Number of registered sockets.
    pub fn open(&self) -> usize {
        self.lock().live.len()
    }

    /// Whether [`Sockets::shutdown_all`] was called.
    pub fn is_shut(&self) -> bool {
        self.lock().shut
    }

    /// `shutdown(SHUT_RDWR)` on every socket, and no new ones. Their readers wake with an end of file, and a walsender
    /// notices within milliseconds, also one that is blocked writing. Doesn't wait for anything.
    pub fn shutdown_all(&self) {
        let mut state = self.lock();
        state.shut = true;
        for socket in state.live.values() {
            // Fails only for a socket that isn't connected (any more).
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    /// The next rung after [`Sockets::shutdown_all`]: `SO_LINGER 0` and our handle closed, so that the kernel sends RST
    /// as soon as the owning task drops its own.
    pub fn reset_all(&self) {
        self.shutdown_all();
        let mut state = self.lock();
        for (_, socket) in state.live.drain() {
            let _ = socket.set_linger(Some(std::time::Duration::ZERO));
        }
        self.0.open.send_replace(0);
    }

    /// Waits until no socket is registered.
    pub async fn closed(&self) {
        // The sender lives in `self`, so this can't fail.
        let _ = self.0.open.subscribe().wait_for(|open| *open == 0).await;
    }

    /// Takes a second handle on a socket that is not connected yet.
    pub(crate) fn register(&self, socket: &impl AsFd) -> Result<Registered, SourceError> {
        let handle = socket.as_fd().try_clone_to_owned().map_err(SourceError::io("register socket"))?;
        let mut state = self.lock();
        if state.shut {
            return Err(SourceError::Shut);
        }
        let id = state.next;
        state.next += 1;
        state.live.insert(id, Socket::from(handle));
        self.0.open.send_replace(state.live.len());
        Ok(Registered { sockets: self.clone(), id })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // The state is consistent at every await-free step, so a panic elsewhere must not disarm the kill switch.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Sockets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sockets").field("open", &self.open()).finish()
    }
}

/// A registration; dropping it closes our second handle.
#[derive(Debug)]
pub(crate) struct Registered {
    sockets: Sockets,
    id: u64,
}

impl Registered {
    /// Tells whether the registry was shut meanwhile: `shutdown` doesn't reach a socket before it is connected.
    pub(crate) fn check(&self) -> Result<(), SourceError> {
        if self.sockets.is_shut() { Err(SourceError::Shut) } else { Ok(()) }
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        let mut state = self.sockets.lock();
        state.live.remove(&self.id);
        self.sockets.0.open.send_replace(state.live.len());
    }
}
