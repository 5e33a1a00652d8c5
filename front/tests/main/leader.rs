use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard},
};

use aura_bus::{Message, SharedBus, Subject};
use aura_domain::{Epoch, FrontId, Lsn, SourceId, SubId};
use aura_wire::control::{Announcement, Exception, Reply, Request, Subscription};
use tokio::task::JoinHandle;

/// A leader that keeps what fronts register and answers as told.
pub(crate) struct Leader {
    pub(crate) state: Arc<Mutex<State>>,
    bus: SharedBus,
    source: SourceId,
    task: JoinHandle<()>,
}

pub(crate) struct State {
    pub(crate) epoch: Epoch,
    pub(crate) streaming: bool,
    /// Whether requests are answered.
    pub(crate) answers: bool,
    /// By table: what is said of its bindings, and whether that is the last word.
    pub(crate) exceptions: BTreeMap<String, (String, bool)>,
    pub(crate) subscriptions: BTreeMap<SubId, Subscription>,
    pub(crate) requests: Vec<Request>,
    pub(crate) front: Option<(FrontId, u64)>,
}

impl Leader {
    pub(crate) async fn start(bus: SharedBus, source: SourceId) -> Self {
        let state = State {
            epoch: Epoch(1),
            streaming: true,
            answers: true,
            exceptions: BTreeMap::new(),
            subscriptions: BTreeMap::new(),
            requests: Vec::new(),
            front: None,
        };
        let state = Arc::new(Mutex::new(state));
        let mut requests = bus.subscribe(&Subject::source_requests(source)).await.expect("a subscription");
        let (shared, replies) = (Arc::clone(&state), Arc::clone(&bus));
        let task = tokio::spawn(async move {
            while let Some(message) = requests.next().await {
                let request = serde_json::from_slice(&message.payload).expect("a request");
                let reply = shared.lock().expect("no panic").take(request);
                if let (Some(reply), Some(to)) = (reply, message.reply) {
                    let payload = serde_json::to_vec(&reply).expect("JSON");
                    replies.publish(Message::new(to, payload)).await.expect("the bus takes it");
                }
            }
        });
        Self { state, bus, source, task }
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic")
    }

    pub(crate) async fn announce(&self, announcement: &Announcement) {
        let payload = serde_json::to_vec(announcement).expect("JSON");
        let message = Message::new(Subject::source_announcements(self.source), payload);
        self.bus.publish(message).await.expect("the bus takes it");
    }

    /// A binding's id with claims, by table and claim `sub`.
    pub(crate) fn sub_id(&self, table: &str, sub: &str) -> SubId {
        self.subscription(table, sub).sub_id
    }

    pub(crate) fn subscription(&self, table: &str, sub: &str) -> Subscription {
        let state = self.state();
        let claim = format!(r#""sub":"{sub}""#);
        let found = state.subscriptions.values().find(|subscription| {
            subscription.spec.table.as_deref() == Some(table) && subscription.spec.claims.as_json().contains(&claim)
        });
        found.expect("a registered subscription").clone()
    }
}

impl Drop for Leader {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl State {
    fn take(&mut self, request: Request) -> Option<Reply> {
        self.requests.push(request.clone());
        if !self.answers {
            return None;
        }
        let mut exceptions = Vec::new();
        match request {
            Request::Join { front, rev, subscriptions } => {
                self.front = Some((front, rev));
                self.admit(subscriptions, &mut exceptions);
            }
            Request::Leave { front, rev, sub_ids } => {
                self.front = Some((front, rev));
                self.subscriptions.retain(|sub_id, _| !sub_ids.contains(sub_id));
            }
            Request::Snapshot { front, rev, part, subscriptions, .. } => {
                self.front = Some((front, rev));
                if part == 0 {
                    self.subscriptions.clear();
                }
                self.admit(subscriptions, &mut exceptions);
            }
        }
        let (epoch, streaming) = (self.epoch, self.streaming);
        Some(Reply { epoch, since: Lsn(1), streaming, exceptions, want_snapshot: false })
    }

    fn admit(&mut self, subscriptions: Vec<Subscription>, exceptions: &mut Vec<Exception>) {
        for subscription in subscriptions {
            let table = subscription.spec.table.clone().unwrap_or_default();
            let said = self.exceptions.get(&table).cloned();
            if let Some((message, fatal)) = &said {
                let exception = Exception { sub_id: subscription.sub_id, message: message.clone(), fatal: *fatal };
                exceptions.push(exception);
            }
            if said.is_none_or(|(_, fatal)| !fatal) {
                self.subscriptions.insert(subscription.sub_id, subscription);
            }
        }
    }
}
