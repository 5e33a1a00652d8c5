//! Connections whose session_user is a project's visibility login (R-RLS-9): opened on demand, the least recently used
//! one closed when there would be too many.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_domain::ProjectId;
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{Sockets, SourceError, SourceUrl, SqlConnection, connect_sql, roles::visibility_login};

/// Bounds opening one.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Bounds waiting for a free one.
const QUEUE_LIMIT: Duration = Duration::from_secs(10);

/// All visibility connections of a source.
pub(super) struct Sessions {
    url: SourceUrl,
    sockets: Sockets,
    max: usize,
    in_use: Arc<Semaphore>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Least recently used first.
    idle: Vec<(ProjectId, SqlConnection)>,
    /// A project uses half of the connections at most, so that a slow one leaves room for others.
    projects: HashMap<ProjectId, Arc<Semaphore>>,
}

/// A connection in use. Dropped, it closes; [`Sessions::put_back`] keeps it.
pub(super) struct Session {
    project: ProjectId,
    pub(super) client: SqlConnection,
    _permits: Permits,
}

struct Permits {
    _project: OwnedSemaphorePermit,
    _source: OwnedSemaphorePermit,
}

impl Sessions {
    pub(super) fn new(url: SourceUrl, sockets: Sockets, max: usize) -> Self {
        let max = max.max(1);
        Self { url, sockets, max, in_use: Arc::new(Semaphore::new(max)), state: Mutex::default() }
    }

    /// A connection of the project, in the state of a fresh one.
    pub(super) async fn take(&self, project: ProjectId, password: &SecretString) -> Result<Session, SourceError> {
        let permits = self.permits(project).await?;
        if let Some(client) = self.idle(project) {
            return Ok(Session { project, client, _permits: permits });
        }
        let url = self.url.with_login(&visibility_login(project), password.expose_secret());
        let client = connect_sql(&url, "aura-visibility", Some(&self.sockets), CONNECT_LIMIT).await?;
        Ok(Session { project, client, _permits: permits })
    }

    /// Keeps a connection for the next check. Only after `DISCARD ALL`.
    pub(super) fn put_back(&self, session: Session) {
        self.lock().idle.push((session.project, session.client));
    }

    async fn permits(&self, project: ProjectId) -> Result<Permits, SourceError> {
        let share = self.share(project);
        let late = SourceError::Timeout { what: "waiting for a visibility connection", limit: QUEUE_LIMIT };
        let both = async {
            // In this order: one who waits for the project's share holds nothing of the others'.
            let _project = share.acquire_owned().await.map_err(|_| SourceError::Shut)?;
            let _source = Arc::clone(&self.in_use).acquire_owned().await.map_err(|_| SourceError::Shut)?;
            Ok(Permits { _project, _source })
        };
        tokio::time::timeout(QUEUE_LIMIT, both).await.map_err(|_| late)?
    }

    fn share(&self, project: ProjectId) -> Arc<Semaphore> {
        let mut state = self.lock();
        // Nobody holds or awaits a permit of those that only this map knows.
        state.projects.retain(|_, share| Arc::strong_count(share) > 1);
        let share = state.projects.entry(project).or_insert_with(|| Arc::new(Semaphore::new(self.max.div_ceil(2))));
        Arc::clone(share)
    }

    /// The project's most recently used idle connection; else makes room for a new one.
    fn idle(&self, project: ProjectId) -> Option<SqlConnection> {
        let mut state = self.lock();
        state.idle.retain(|(_, client)| !client.is_closed());
        if let Some(at) = state.idle.iter().rposition(|(owner, _)| *owner == project) {
            return Some(state.idle.remove(at).1);
        }
        let in_use = self.max - self.in_use.available_permits();
        if in_use + state.idle.len() > self.max {
            state.idle.remove(0);
        }
        None
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
