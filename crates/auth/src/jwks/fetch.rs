use std::{io, net::SocketAddr, sync::Arc, time::Duration};

use reqwest::{
    Client,
    dns::{Addrs, Name, Resolve, Resolving},
    redirect,
};
use rustls::{ClientConfig, RootCertStore};
use tokio::sync::OnceCell;
use url::Url;

use super::{
    UrlError, address,
    parse::{self, Keys, SetError},
};

/// Longest look, from the look-up of the name to the last byte.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer in bytes.
const MAX_BYTES: usize = 64 << 10;

/// Why a key set could not be read. Never holds the URL.
#[derive(Debug, thiserror::Error)]
pub(super) enum FetchError {
    #[error("the URL can't be used: {0}")]
    Url(#[from] UrlError),
    #[error("no TLS here")]
    Tls(#[from] rustls::Error),
    #[error("{}", cause(.0))]
    Http(reqwest::Error),
    #[error("it answered {0}")]
    Status(u16),
    #[error("the answer is larger than {MAX_BYTES} bytes")]
    TooLarge,
    #[error(transparent)]
    Set(#[from] SetError),
}

impl From<reqwest::Error> for FetchError {
    fn from(error: reqwest::Error) -> Self {
        Self::Http(error.without_url())
    }
}

/// The innermost cause says what happened.
fn cause(error: &reqwest::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// Reads key sets: no redirects, no proxy, no connection kept.
#[derive(Debug)]
pub(super) struct Fetcher {
    loopback: bool,
    /// Made when it is first needed: reading the system's certificates takes a while.
    client: OnceCell<Client>,
}

impl Fetcher {
    pub(super) fn new(loopback: bool) -> Self {
        Self { loopback, client: OnceCell::new() }
    }

    pub(super) fn check(&self, url: &str) -> Result<Url, UrlError> {
        address::check(url, self.loopback)
    }

    pub(super) async fn fetch(&self, url: &str) -> Result<Keys, FetchError> {
        let url = self.check(url)?;
        let client = self.client.get_or_try_init(|| client(self.loopback)).await?;
        let mut response = client.get(url).header("accept", "application/json").send().await?;
        if response.status() != 200 {
            return Err(FetchError::Status(response.status().as_u16()));
        }
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await? {
            if body.len() + chunk.len() > MAX_BYTES {
                return Err(FetchError::TooLarge);
            }
            body.extend_from_slice(&chunk);
        }
        Ok(parse::parse(&body)?)
    }
}

async fn client(loopback: bool) -> Result<Client, FetchError> {
    let certificates = tokio::task::spawn_blocking(|| rustls_native_certs::load_native_certs().certs).await;
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(certificates.unwrap_or_default());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let tls = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions()?;
    let client = Client::builder()
        .tls_backend_preconfigured(tls.with_root_certificates(roots).with_no_client_auth())
        .https_only(!loopback)
        .redirect(redirect::Policy::none())
        .no_proxy()
        .dns_resolver(Arc::new(Resolver { loopback }))
        .pool_max_idle_per_host(0)
        .timeout(TIMEOUT);
    Ok(client.build()?)
}

/// Looks a name up and answers nothing unless every address may be asked: what is connected to is what was judged.
struct Resolver {
    loopback: bool,
}

impl Resolve for Resolver {
    fn resolve(&self, name: Name) -> Resolving {
        let loopback = self.loopback;
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = tokio::net::lookup_host((name.as_str(), 0)).await?.collect();
            if addresses.iter().all(|found| address::is_allowed(found.ip(), loopback)) {
                return Ok(Box::new(addresses.into_iter()) as Addrs);
            }
            Err(io::Error::new(io::ErrorKind::PermissionDenied, UrlError::NotPublic).into())
        })
    }
}
