//! How often somebody may ask: a bucket per key and one per address, and headers that say what is left.

use std::{
    fmt,
    hash::{BuildHasher, Hash, RandomState},
    net::{IpAddr, SocketAddr},
    num::NonZeroU32,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::{ConnectInfo, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use governor::{
    Quota, RateLimiter,
    clock::{Clock, Reference},
    middleware::{StateInformationMiddleware, StateSnapshot},
    nanos::Nanos,
    state::keyed::DashMapStateStore,
};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use tokio::time::Instant;

use super::{
    ALWAYS,
    client::{TrustedProxies, counted_as},
};
use crate::{Code, Problem};

/// A bucket holds what comes in so many seconds: whoever was quiet may do that much at once.
const BURST_SECONDS: u32 = 10;
/// Buckets that are full again are forgotten every so many requests.
const SWEEP_EVERY: u32 = 1024;

const LIMIT: HeaderName = HeaderName::from_static("ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("ratelimit-remaining");
const RESET: HeaderName = HeaderName::from_static("ratelimit-reset");
const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");

/// What a surface takes of one client. Cheap to clone; clones count together.
#[derive(Debug, Clone, Default)]
pub struct Limits(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    proxies: TrustedProxies,
    per_address: Option<Buckets<IpAddr>>,
    /// Of the control plane only: an anon key is every browser's, so there it says nothing about who asks.
    per_key: Option<Buckets<u64>>,
    /// Keys are known by their hash only. Its seed is this process's, so nobody can aim at another one's bucket.
    hash: RandomState,
}

impl Limits {
    /// Nobody is limited.
    pub fn off() -> Self {
        Self::default()
    }

    /// Requests a second per address and, on `/v1/`, per key; 0 = no limit.
    pub fn new(per_address: u32, per_key: u32, proxies: TrustedProxies) -> Self {
        let (per_address, per_key) = (Buckets::new(per_address), Buckets::new(per_key));
        Self(Some(Arc::new(Inner { proxies, per_address, per_key, hash: RandomState::new() })))
    }

    /// Middleware: refuses with 429, and says in every answer what is left of the bucket that has less.
    pub(super) async fn pass(State(limits): State<Self>, request: Request, next: Next) -> Response {
        let path = request.uri().path();
        let Some(limits) = limits.0.filter(|_| !ALWAYS.iter().any(|probe| path.starts_with(probe))) else {
            return next.run(request).await;
        };
        match limits.count(&request) {
            Err(refused) => refused.into_response(),
            Ok(standing) => {
                let mut response = next.run(request).await;
                // A handler's own limit is another one than ours.
                let is_refused = response.status() == StatusCode::TOO_MANY_REQUESTS;
                if let Some(standing) = standing.filter(|_| !is_refused) {
                    standing.write(response.headers_mut());
                }
                response
            }
        }
    }
}

impl Inner {
    /// Takes one from each bucket; the one that has less.
    fn count(&self, request: &Request) -> Result<Option<Standing>, Refused> {
        let peer = request.extensions().get::<ConnectInfo<SocketAddr>>();
        let address = peer.map(|peer| counted_as(self.proxies.client(peer.0.ip(), request.headers())));
        let of_address = match (&self.per_address, address) {
            (Some(buckets), Some(address)) => {
                Some(buckets.take(&address).map_err(|standing| Refused { by: "address", standing })?)
            }
            _ => None,
        };
        let key = request.uri().path().starts_with("/v1/").then(|| credential(request.headers())).flatten();
        let of_key = match (&self.per_key, key) {
            (Some(buckets), Some(key)) => {
                let taken = buckets.take(&self.hash.hash_one(key));
                Some(taken.map_err(|standing| Refused { by: "key", standing })?)
            }
            _ => None,
        };
        Ok(of_key.into_iter().chain(of_address).min_by_key(|standing| standing.remaining))
    }
}

/// Not yet verified: whoever sends another one has another bucket, and is counted by its address.
fn credential(headers: &HeaderMap) -> Option<&[u8]> {
    let found = headers.get(header::AUTHORIZATION).or_else(|| headers.get("apikey"));
    found.or_else(|| headers.get(header::COOKIE)).map(HeaderValue::as_bytes)
}

/// Over a limit.
struct Refused {
    by: &'static str,
    standing: Standing,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        metrics::counter!("http_rate_limited_total", "by" => self.by).increment(1);
        let detail = format!(
            "This {} asked too often: {} at once, then {} a second.",
            self.by,
            self.standing.limit,
            self.standing.limit / BURST_SECONDS
        );
        let problem = Problem::new(Code::RateLimited, detail).retry_after(self.standing.reset);
        let mut response = problem.into_response();
        self.standing.write(response.headers_mut());
        response
    }
}

/// A bucket after a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Requests that it holds when it is full.
    pub limit: u32,
    /// Requests that are left.
    pub remaining: u32,
    /// Seconds until it is full again; of a refusal, until the next request is taken.
    pub reset: u64,
    /// Seconds in which it fills.
    pub window: u64,
}

impl Standing {
    /// Writes the `RateLimit-*` headers.
    pub fn write(&self, headers: &mut HeaderMap) {
        headers.insert(LIMIT, self.limit.into());
        headers.insert(REMAINING, self.remaining.into());
        headers.insert(RESET, self.reset.into());
        if let Ok(policy) = HeaderValue::from_str(&format!("{};w={}", self.limit, self.window)) {
            headers.insert(POLICY, policy);
        }
    }

    fn after(snapshot: &StateSnapshot) -> Self {
        let (quota, remaining) = (snapshot.quota(), snapshot.remaining_burst_capacity());
        let limit = quota.burst_size().get();
        let reset = seconds(quota.replenish_interval() * (limit - remaining.min(limit)));
        Self { limit, remaining, reset, window: u64::from(BURST_SECONDS) }
    }
}

/// Rounded up: who waits so long isn't refused again.
fn seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// One bucket per `K`. What is remembered is bounded by the requests of the last [`BURST_SECONDS`] seconds.
struct Buckets<K: Hash + Eq + Clone> {
    limiter: RateLimiter<K, DashMapStateStore<K>, Runtime, StateInformationMiddleware>,
    quota: Quota,
    clock: Runtime,
    taken: AtomicU32,
}

impl<K: Hash + Eq + Clone> Buckets<K> {
    /// `None` for a rate of 0.
    fn new(per_second: u32) -> Option<Self> {
        let rate = NonZeroU32::new(per_second)?;
        let quota = Quota::per_second(rate).allow_burst(rate.saturating_mul(NonZeroU32::new(BURST_SECONDS)?));
        let clock = Runtime(Instant::now());
        let limiter = RateLimiter::new(quota, DashMapStateStore::default(), clock.clone());
        Some(Self { limiter, quota, clock, taken: AtomicU32::new(0) })
    }

    fn take(&self, key: &K) -> Result<Standing, Standing> {
        if self.taken.fetch_add(1, Ordering::Relaxed) % SWEEP_EVERY == SWEEP_EVERY - 1 {
            self.limiter.retain_recent();
        }
        self.limiter.check_key(key).map(|snapshot| Standing::after(&snapshot)).map_err(|refused| Standing {
            limit: self.quota.burst_size().get(),
            remaining: 0,
            reset: seconds(refused.wait_time_from(self.clock.now())).max(1),
            window: u64::from(BURST_SECONDS),
        })
    }
}

impl<K: Hash + Eq + Clone> fmt::Debug for Buckets<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buckets").field("quota", &self.quota).finish_non_exhaustive()
    }
}

/// The runtime's clock, which tests can stop.
#[derive(Debug, Clone)]
struct Runtime(Instant);

impl Clock for Runtime {
    type Instant = Since;

    fn now(&self) -> Since {
        Since(self.0.elapsed())
    }
}

/// Since the start of a [`Runtime`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Since(Duration);

impl std::ops::Add<Nanos> for Since {
    type Output = Self;

    fn add(self, more: Nanos) -> Self {
        Self(self.0 + Duration::from(more))
    }
}

impl Reference for Since {
    fn duration_since(&self, earlier: Self) -> Nanos {
        self.0.saturating_sub(earlier.0).into()
    }

    fn saturating_sub(&self, duration: Nanos) -> Self {
        Self(self.0.checked_sub(duration.into()).unwrap_or(self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_the_headers_say_is_so() {
        let buckets = Buckets::new(2).expect("a limit");
        let left: Vec<_> = (0..20).map(|_| buckets.take(&1).expect("room").remaining).collect();
        assert_eq!(left, (0..20).rev().collect::<Vec<_>>());
        let refused = buckets.take(&1).expect_err("empty");
        assert_eq!(refused, Standing { limit: 20, remaining: 0, reset: 1, window: 10 });
        assert!(buckets.take(&2).is_ok(), "somebody else");
        tokio::time::advance(Duration::from_secs(refused.reset)).await;
        let again = buckets.take(&1).expect("as it said");
        assert_eq!((again.remaining, again.reset), (1, 10));
        tokio::time::advance(Duration::from_secs(again.reset)).await;
        assert_eq!(buckets.take(&1).expect("room").remaining, 19, "full, but for this one");
    }

    #[tokio::test(start_paused = true)]
    async fn n_9_a_bucket_that_is_full_again_is_forgotten() {
        let buckets = Buckets::new(100).expect("a limit");
        for key in 0..100_000 {
            assert!(buckets.take(&key).is_ok());
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        assert!(buckets.limiter.len() <= SWEEP_EVERY as usize + 10, "{}", buckets.limiter.len());
        assert!(Buckets::<u64>::new(0).is_none(), "0 is no limit");
    }
}
