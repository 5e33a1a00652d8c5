use aura_domain::{ProjectId, SourceId};
use sqlx::postgres::PgListener;

use crate::{Store, StoreError, bounded};

/// Something in the platform database changed. Signals say "look", never "this is the new state": one may be lost, so
/// receivers poll as well (3 s).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Registrations of a source.
    Registry(SourceId),
    /// Desired state or set-up of some engine.
    Engines,
    /// A project, its keys included.
    Project(ProjectId),
    /// The connection was lost and is back: signals may have been missed, reload everything.
    Lost,
}

/// `LISTEN aura_registry, aura_engines, aura_projects` on a connection of its own, which reconnects by itself.
#[derive(Debug)]
pub struct SignalListener {
    inner: PgListener,
}

/// `LISTEN aura_registry_status`: progress of registrations, for a PUT that waits.
#[derive(Debug)]
pub struct StatusListener {
    inner: PgListener,
}

impl Store {
    /// Listens for changes that workers and fronts act on.
    pub async fn listen(&self) -> Result<SignalListener, StoreError> {
        Ok(SignalListener { inner: self.listener(&["aura_registry", "aura_engines", "aura_projects"]).await? })
    }

    /// Listens for progress that the api waits for.
    pub async fn listen_status(&self) -> Result<StatusListener, StoreError> {
        Ok(StatusListener { inner: self.listener(&["aura_registry_status"]).await? })
    }

    async fn listener(&self, channels: &[&str]) -> Result<PgListener, StoreError> {
        bounded(async {
            let mut listener = PgListener::connect_with(&self.pool).await?;
            listener.listen_all(channels.iter().copied()).await?;
            Ok(listener)
        })
        .await
    }
}

impl SignalListener {
    /// The next signal. Cancel-safe. On an error the database is away: pause a little and call again.
    pub async fn next(&mut self) -> Result<Signal, StoreError> {
        loop {
            let Some(notification) = self.inner.try_recv().await? else { return Ok(Signal::Lost) };
            match notification.channel() {
                "aura_registry" => match notification.payload().parse() {
                    Ok(source) => return Ok(Signal::Registry(source)),
                    // Somebody else's NOTIFY.
                    Err(_) => continue,
                },
                "aura_engines" => return Ok(Signal::Engines),
                _ => match notification.payload().parse() {
                    Ok(project) => return Ok(Signal::Project(project)),
                    Err(_) => continue,
                },
            }
        }
    }
}

impl StatusListener {
    /// The source in which a registration made progress; `None` = the connection was lost, look yourself. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<SourceId>, StoreError> {
        loop {
            let Some(notification) = self.inner.try_recv().await? else { return Ok(None) };
            if let Ok(source) = notification.payload().parse() {
                return Ok(Some(source));
            }
        }
    }
}
