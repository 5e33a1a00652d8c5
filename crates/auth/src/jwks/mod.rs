//! Public keys of end users' tokens, from where a project says (R-SEC-2). Bounded in everything that a stranger decides:
//! how often we look, how long, how much is read and kept, and whom we ask.

mod address;
mod fetch;
mod parse;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use moka::future::Cache;
use tokio::{sync::OwnedMutexGuard, time::Instant};

pub use address::UrlError;
use fetch::Fetcher;
pub(crate) use parse::SetKey;
use parse::{Keys, MAX_KID};

/// Between two looks at a URL, whoever asks and whatever came of it.
const REFRESH: Duration = Duration::from_secs(30);
/// Keys of an endpoint that is away for so long are no longer accepted: one that was withdrawn meanwhile would be.
const STALE: Duration = Duration::from_secs(24 * 3600);
/// URLs that are remembered. With at most 32 keys each that is 160 MiB if every one of them is as large as can be.
const SETS: u64 = 4096;

/// How key sets are read.
#[derive(Debug, Clone, Copy)]
pub struct JwksOptions {
    /// Allows `http` and `https` URLs of the loopback, and nothing else: for development and tests.
    pub loopback: bool,
    /// Between two looks at a URL.
    pub refresh: Duration,
}

impl Default for JwksOptions {
    fn default() -> Self {
        Self { loopback: false, refresh: REFRESH }
    }
}

/// No key of the URL was ever seen, or not for a day: nobody can say whether a token is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Unavailable;

/// The key sets of all projects in this process.
#[derive(Debug)]
pub(crate) struct KeySets {
    sets: Cache<String, Arc<KeySet>>,
    fetcher: Arc<Fetcher>,
    refresh: Duration,
}

#[derive(Debug, Default)]
struct KeySet {
    state: Mutex<State>,
    /// Held by who looks at the URL.
    looking: Arc<tokio::sync::Mutex<()>>,
}

#[derive(Debug, Default)]
struct State {
    keys: Keys,
    loaded: Option<Instant>,
    tried: Option<Instant>,
}

impl KeySets {
    pub(crate) fn new(options: JwksOptions) -> Self {
        let fetcher = Arc::new(Fetcher::new(options.loopback));
        Self { sets: Cache::new(SETS), fetcher, refresh: options.refresh }
    }

    /// Whether a project may have this URL.
    pub(crate) fn check_url(&self, url: &str) -> Result<(), UrlError> {
        self.fetcher.check(url).map(|_| ())
    }

    /// The key if it is known now; asks nobody and waits for nobody.
    pub(crate) async fn known(&self, url: &str, kid: &str) -> Option<Arc<SetKey>> {
        let set = self.sets.get(url).await?;
        let found = set.key(kid)?;
        // What was withdrawn is forgotten at the next look, which nobody waits for.
        if set.is_due(self.refresh)
            && let Ok(looking) = Arc::clone(&set.looking).try_lock_owned()
        {
            drop(self.look(url, &set, looking));
        }
        Some(found)
    }

    /// The key, looked up at the URL if it isn't known and nobody looked for a while.
    pub(crate) async fn find(&self, url: &str, kid: &str) -> Result<Option<Arc<SetKey>>, Unavailable> {
        if kid.len() > MAX_KID {
            return Ok(None);
        }
        let set = self.sets.get_with_by_ref(url, async { Arc::default() }).await;
        let looking = Arc::clone(&set.looking).lock_owned().await;
        if set.key(kid).is_none() && set.is_due(self.refresh) {
            // Its own task: who asks may go away, and would take the only look of the next while with it.
            drop(self.look(url, &set, looking).await);
        }
        if set.is_known() { Ok(set.key(kid)) } else { Err(Unavailable) }
    }

    /// Reads the URL in the background.
    fn look(&self, url: &str, set: &Arc<KeySet>, looking: OwnedMutexGuard<()>) -> tokio::task::JoinHandle<()> {
        set.state().tried = Some(Instant::now());
        let (url, set, fetcher) = (url.to_owned(), Arc::clone(set), Arc::clone(&self.fetcher));
        tokio::spawn(async move {
            match fetcher.fetch(&url).await {
                Ok(keys) => {
                    let mut state = set.state();
                    state.keys = keys;
                    state.loaded = Some(Instant::now());
                }
                // The keys that we have stay good. The URL may carry what is nobody's business.
                Err(error) => tracing::warn!(%error, "can't read a key set, keeping what we have"),
            }
            drop(looking);
        })
    }
}

impl KeySet {
    fn key(&self, kid: &str) -> Option<Arc<SetKey>> {
        let state = self.state();
        state.keys.get(kid).filter(|_| state.is_fresh()).cloned()
    }

    fn is_known(&self) -> bool {
        self.state().is_fresh()
    }

    fn is_due(&self, refresh: Duration) -> bool {
        self.state().tried.is_none_or(|tried| tried.elapsed() >= refresh)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_fresh(&self) -> bool {
        self.loaded.is_some_and(|loaded| loaded.elapsed() < STALE)
    }
}
