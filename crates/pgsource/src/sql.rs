use std::{
    ops::{Deref, DerefMut},
    time::Duration,
};

use tokio::sync::watch;
use tokio_postgres::{Client, NoTls, error::SqlState};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{Sockets, SourceError, SourceUrl, error::CONNECTING, frames::Frames, transport};

/// How long a dropped connection may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);

/// An SQL connection to a source with the session settings of R-DEC-1 and an empty `search_path`; a
/// [`tokio_postgres::Client`] by dereference. Dropping it closes the socket within a second.
pub struct SqlConnection {
    client: Client,
    ended: watch::Receiver<Option<SqlState>>,
    _open: DropGuard,
}

impl SqlConnection {
    /// Waits until the server says goodbye, and answers with which code; a connection that just breaks says none.
    /// Cancel-safe.
    pub async fn said_goodbye(&self) -> SqlState {
        let mut ended = self.ended.clone();
        let code = ended.wait_for(Option::is_some).await.ok().and_then(|code| code.clone());
        match code {
            Some(code) => code,
            None => std::future::pending().await,
        }
    }
}

impl Deref for SqlConnection {
    type Target = Client;
    fn deref(&self) -> &Client {
        &self.client
    }
}

impl DerefMut for SqlConnection {
    fn deref_mut(&mut self) -> &mut Client {
        &mut self.client
    }
}

/// Connects. With `sockets` the connection can be cut by [`Sockets::shutdown_all`]; `timeout` bounds name look-up,
/// connect, TLS and authentication together. Queries have no deadline of their own: set `statement_timeout`, and bound
/// the await.
pub async fn connect_sql(
    url: &SourceUrl,
    application_name: &str,
    sockets: Option<&Sockets>,
    timeout: Duration,
) -> Result<SqlConnection, SourceError> {
    let connect = Box::pin(connect(url, application_name, sockets));
    let limit = SourceError::Timeout { what: CONNECTING, limit: timeout };
    tokio::time::timeout(timeout, connect).await.map_err(|_| limit)?
}

async fn connect(
    url: &SourceUrl,
    application_name: &str,
    sockets: Option<&Sockets>,
) -> Result<SqlConnection, SourceError> {
    let stream = Frames::new(transport::open(url, sockets).await?);
    let mut config = url.config().clone();
    config.application_name(application_name).options(url.startup_options());
    let (client, connection) = config.connect_raw(stream, NoTls).await?;
    let dropped = CancellationToken::new();
    let guard = dropped.clone().drop_guard();
    let (tell, ended) = watch::channel(None);
    // Ends with the connection, or at the latest GOODBYE after the client was dropped.
    tokio::spawn(async move {
        tokio::pin!(connection);
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tell.send_replace(error.code().cloned());
                    tracing::debug!(error = %SourceError::from(error), "SQL connection ended");
                }
            }
            () = dropped.cancelled() => {
                let _ = tokio::time::timeout(GOODBYE, connection).await;
            }
        }
    });
    Ok(SqlConnection { client, ended, _open: guard })
}
