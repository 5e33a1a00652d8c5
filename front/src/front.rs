use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use aura_bus::SharedBus;
use aura_domain::SubIdKey;
use aura_kit::ShutdownHandle;
use axum::{Router, routing::get};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    departure::Departure, hub::HubRunner, identity::Authenticator, orders, registrar::Registrar,
    settings::FrontSettings, socket, sse, store_auth::StoreAuthenticator,
};

/// What a front needs of others.
pub struct FrontDeps {
    /// The platform database: projects and their keys.
    pub store: aura_store::Store,
    /// Where changes come from.
    pub bus: SharedBus,
    /// Key of the `sub_id`s, equal in every process of an installation.
    pub sub_id_key: SubIdKey,
    /// The rest.
    pub settings: FrontSettings,
}

/// What all sockets of a front share.
pub(crate) struct Shared {
    pub(crate) auth: Arc<dyn Authenticator>,
    pub(crate) bus: SharedBus,
    pub(crate) hubs: HubRunner,
    pub(crate) registrar: Registrar,
    pub(crate) sub_id_key: SubIdKey,
    pub(crate) settings: FrontSettings,
    /// When sockets and streams are to be closed.
    pub(crate) departure: Departure,
    /// Sockets and streams.
    pub(crate) tracker: TaskTracker,
    channels: AtomicU64,
}

impl Shared {
    /// A number that grows with every channel.
    pub(crate) fn next_channel(&self) -> u64 {
        self.channels.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn draining(&self) -> bool {
        self.departure.has_begun()
    }
}

/// A front: the endpoints that clients connect to, and the background work behind them. Cheap to clone.
#[derive(Clone)]
pub struct Front {
    shared: Arc<Shared>,
    /// Hubs, links and heartbeats.
    background: TaskTracker,
    stop: CancellationToken,
}

impl Front {
    /// A front that authenticates against the platform database.
    pub fn new(deps: FrontDeps) -> Self {
        let auth = Arc::new(StoreAuthenticator::new(deps.store, deps.settings.verifier.clone()));
        Self::with_authenticator(auth, deps.bus, deps.sub_id_key, deps.settings)
    }

    /// A front with another way to authenticate.
    pub fn with_authenticator(
        auth: Arc<dyn Authenticator>,
        bus: SharedBus,
        sub_id_key: SubIdKey,
        settings: FrontSettings,
    ) -> Self {
        let (background, stop) = (TaskTracker::new(), CancellationToken::new());
        let front_id = settings.front_id.clone();
        let hubs = HubRunner::new(Arc::clone(&bus), front_id.clone(), background.clone(), stop.clone());
        let registrar = Registrar::new(
            Arc::clone(&bus),
            front_id,
            settings.heartbeat,
            hubs.clone(),
            background.clone(),
            stop.clone(),
        );
        let shared = Shared {
            auth,
            bus,
            hubs,
            registrar,
            sub_id_key,
            settings,
            departure: Departure::default(),
            tracker: TaskTracker::new(),
            channels: AtomicU64::new(0),
        };
        Self { shared: Arc::new(shared), background, stop }
    }

    /// The endpoints, with and without the gateway's prefix.
    pub fn router(&self) -> Router {
        Router::new()
            .route("/socket/websocket", get(socket::upgrade))
            .route("/realtime/v1/websocket", get(socket::upgrade))
            .route("/realtime/v1/sse", get(sse::stream))
            .with_state(Arc::clone(&self.shared))
    }

    /// Drives the background work until `stop`, then tells the workers that this front leaves. Call [`Self::drain`] first.
    pub async fn run(&self, stop: CancellationToken) {
        let end = async {
            stop.cancelled().await;
            self.stop.cancel();
        };
        let orders = self.stop.run_until_cancelled(orders::run(&self.shared));
        tokio::join!(self.shared.registrar.run(), orders, end);
        self.background.close();
        self.background.wait().await;
    }

    /// Closes all sockets (1012, "service restart") and streams, refuses new ones, and returns when all are gone. They
    /// leave one after the other, over at most half of the time until the shutdown's deadline (R-FRT-8); when that moves,
    /// all at once.
    pub async fn drain(&self, shutdown: &ShutdownHandle) {
        let mut deadlines = shutdown.deadlines();
        let left = deadlines.borrow_and_update().map(|deadline| deadline.saturating_duration_since(Instant::now()));
        self.shared.departure.begin(self.connections(), left.unwrap_or_default() / 2);
        self.shared.tracker.close();
        tokio::select! {
            () = self.shared.tracker.wait() => return,
            _ = deadlines.changed() => self.shared.departure.hurry(),
        }
        self.shared.tracker.wait().await;
    }

    /// Sockets and streams that are open.
    pub fn connections(&self) -> usize {
        self.shared.tracker.len()
    }
}
