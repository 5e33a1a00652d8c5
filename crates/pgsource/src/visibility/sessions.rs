//! Connections whose session_user is a project's visibility login (R-RLS-9): opened on demand, the least recently used
//! one closed when there would be too many.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_domain::ProjectId;
use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::types::{ToSql, Type};

use super::places::{Place, Places};
use crate::{Sockets, SourceError, SourceUrl, SqlConnection, connect_sql, roles::visibility_login};

/// What a backend that nobody is left to end, since our process or engine has ended, may still wait for a lock: more than
/// the caller waits for all answers of a check.
const BACKEND_LIMIT: Duration = Duration::from_millis(3500);
/// Bounds opening one.
const CONNECT_LIMIT: Duration = Duration::from_secs(2);
/// Bounds waiting for a free one.
const QUEUE_LIMIT: Duration = Duration::from_secs(10);

/// Bounds ending a backend.
const END_LIMIT: Duration = Duration::from_secs(2);
/// Between two looks whether it has ended.
const END_PAUSE: Duration = Duration::from_millis(20);

/// All visibility connections of a source.
pub(super) struct Sessions {
    url: SourceUrl,
    sockets: Sockets,
    max: usize,
    places: Places,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    /// Least recently used first.
    idle: Vec<(ProjectId, Open)>,
}

/// A connection and the server's process behind it.
struct Open {
    client: SqlConnection,
    backend: Backend,
}

struct Backend {
    pid: i32,
    /// `backend_start`, since process ids come again.
    started: String,
}

/// A connection in use. [`Sessions::put_back`] keeps it. Dropped, it closes, and its backend is ended.
pub(super) struct Session {
    project: ProjectId,
    pub(super) client: SqlConnection,
    lease: Lease,
}

/// Ends the backend of a session that isn't put back. What it runs may be tenant code that catches its time limit, and a
/// server that runs something doesn't see that nobody is there any more.
struct Lease(Option<Held>);

struct Held {
    backend: Backend,
    login: Login,
    state: Arc<Mutex<State>>,
    place: Place,
}

/// How a project's visibility login connects.
struct Login {
    project: ProjectId,
    url: SourceUrl,
    sockets: Sockets,
}

impl Sessions {
    pub(super) fn new(url: SourceUrl, sockets: Sockets, max: usize) -> Self {
        let max = max.max(1);
        Self { url, sockets, max, places: Places::new(max), state: Arc::default() }
    }

    /// A connection of the project, in the state of a fresh one. [`SourceError::Busy`] if none is free for a long time.
    pub(super) async fn take(&self, project: ProjectId, password: &SecretString) -> Result<Session, SourceError> {
        let place = tokio::time::timeout(QUEUE_LIMIT, self.places.take(project)).await;
        let place = place.map_err(|_| SourceError::Busy { limit: QUEUE_LIMIT })?.ok_or(SourceError::Shut)?;
        self.open(place, project, password).await
    }

    /// The same for a probe: `None` if no place is free now, or the project has another one under way.
    pub(super) async fn spare(
        &self,
        project: ProjectId,
        password: &SecretString,
    ) -> Result<Option<Session>, SourceError> {
        let Some(place) = self.places.spare(project) else { return Ok(None) };
        self.open(place, project, password).await.map(Some)
    }

    async fn open(&self, place: Place, project: ProjectId, password: &SecretString) -> Result<Session, SourceError> {
        let login = self.url.with_login(&visibility_login(project), password.expose_secret());
        let url = login.with_statement_timeout(BACKEND_LIMIT);
        let login = Login { project, url, sockets: self.sockets.clone() };
        let Open { client, backend } = match self.idle(project) {
            Some(open) => open,
            None => login.open().await?,
        };
        let held = Held { backend, login, state: Arc::clone(&self.state), place };
        Ok(Session { project, client, lease: Lease(Some(held)) })
    }

    /// Keeps a connection for the next check. Only after `DISCARD ALL`.
    pub(super) fn put_back(&self, session: Session) {
        let Session { project, client, mut lease } = session;
        if let Some(held) = lease.0.take() {
            lock(&self.state).idle.push((project, Open { client, backend: held.backend }));
        }
    }

    /// The project's most recently used idle connection; else makes room for a new one.
    fn idle(&self, project: ProjectId) -> Option<Open> {
        let mut state = lock(&self.state);
        state.idle.retain(|(_, open)| !open.client.is_closed());
        if let Some(at) = state.idle.iter().rposition(|(owner, _)| *owner == project) {
            return Some(state.idle.remove(at).1);
        }
        if self.places.taken() + state.idle.len() > self.max {
            state.idle.remove(0);
        }
        None
    }
}

impl Login {
    async fn open(&self) -> Result<Open, SourceError> {
        let client = connect_sql(&self.url, "aura-visibility", Some(&self.sockets), CONNECT_LIMIT).await?;
        let late = SourceError::Timeout { what: "asking for the server's process", limit: CONNECT_LIMIT };
        let sql =
            "select pid, backend_start::text from pg_catalog.pg_stat_activity where pid = pg_catalog.pg_backend_pid()";
        let asked = tokio::time::timeout(CONNECT_LIMIT, client.query_typed(sql, &[])).await.map_err(|_| late)??;
        let row = asked.first().ok_or(SourceError::Protocol("a session that pg_stat_activity doesn't show"))?;
        let backend = Backend { pid: row.try_get(0)?, started: row.try_get(1)? };
        Ok(Open { client, backend })
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // Without a runtime there is nobody left to do it.
        if let Some((held, runtime)) = self.0.take().zip(tokio::runtime::Handle::try_current().ok()) {
            runtime.spawn(held.end());
        }
    }
}

impl Held {
    /// Until then nobody else gets the connection's place, so that there are never more backends than places, but for the
    /// one that does this; it is used afterwards.
    async fn end(self) {
        let ended = async {
            let open = self.login.open().await?;
            while self.backend.terminate(&open.client).await? {
                tokio::time::sleep(END_PAUSE).await;
            }
            Ok::<_, SourceError>(open)
        };
        match tokio::time::timeout(END_LIMIT, ended).await {
            Ok(Ok(open)) => lock(&self.state).idle.push((self.login.project, open)),
            Ok(Err(SourceError::Shut)) => {}
            Ok(Err(error)) => {
                tracing::debug!(project = %self.login.project, %error, "an abandoned check's backend can't be ended");
            }
            Err(_) => tracing::warn!(project = %self.login.project, "an abandoned check's backend doesn't end"),
        }
        drop(self.place);
    }
}

impl Backend {
    /// Whether there was still one to end.
    async fn terminate(&self, client: &SqlConnection) -> Result<bool, SourceError> {
        let sql = "select pg_catalog.pg_terminate_backend(pid) from pg_catalog.pg_stat_activity \
             where pid = $1 and backend_start::text = $2";
        let params: [(&(dyn ToSql + Sync), Type); 2] = [(&self.pid, Type::INT4), (&self.started, Type::TEXT)];
        Ok(!client.query_typed(sql, &params).await?.is_empty())
    }
}

fn lock(state: &Mutex<State>) -> std::sync::MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
