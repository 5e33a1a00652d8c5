//! The bus as a front sees it, with as many subscriptions as a figure needs and no sockets behind them.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aura_bus::{Bus as _, Message, NatsBus, NatsOptions, Subject, Subscription};
use aura_domain::{Claims, EventFilter, FrontId, ProjectId, SourceId, SubId, SubscriptionSpec};
use aura_wire::{
    IncomingChange,
    control::{Heartbeat, Reply, Request, SourceState, Subscription as Registered},
};
use serde_json::Value;
use system_tests::{Project, Split};
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(60);
/// As a front's.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// Subscriptions of one front: no other one's has the same number, so that none is taken for another's that is on its way out.
const PER_FRONT: u64 = 1 << 20;
/// Twins are numbered from here.
const TWIN: u64 = 1 << 40;
/// Subscriptions of one request: the protocol's limit is 256 KiB.
const CHUNK: usize = 200;

/// Who subscribes.
pub(super) struct Who {
    pub(super) claims: Value,
    pub(super) filter: Option<String>,
}

/// A row that has arrived.
pub(super) struct Arrived {
    pub(super) id: i64,
    pub(super) subscribers: Vec<u64>,
    pub(super) when: Instant,
}

/// Registered subscriptions of one table; gone when dropped, for the worker after its heartbeats' absence or [`Self::leave`].
pub(super) struct Front {
    bus: std::sync::Arc<NatsBus>,
    messages: Subscription,
    name: FrontId,
    first: u64,
    heart: JoinHandle<()>,
    table: String,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.heart.abort();
    }
}

impl Front {
    /// Returns when the worker judges everything that commits from now on for all of them. The n-th one has the id n.
    pub(super) async fn join(split: &Split, project: &Project, number: u64, table: &str, who: &[Who]) -> Result<Self> {
        let bus = std::sync::Arc::new(
            NatsBus::connect(NatsOptions::new(split.nats.url_as("aura-front", "aura-front"), "bench")).await?,
        );
        let tenant: ProjectId = project.id.parse()?;
        let source: SourceId = source(split).await?;
        let messages = bus.subscribe(&Subject::project_tree(tenant)).await?;
        let (name, first) = (FrontId(format!("bench-{number}")), number * PER_FRONT);
        let mut rev = 0;
        for (at, chunk) in who.chunks(CHUNK).enumerate() {
            rev += 1;
            let registered = |(n, who): (usize, &Who)| registered(tenant, table, first + (at * CHUNK + n) as u64, who);
            let subscriptions = chunk.iter().enumerate().map(registered).collect::<Result<Vec<_>>>()?;
            let request = Request::Join { front: name.clone(), rev, subscriptions };
            let message = Message::new(Subject::source_requests(source), serde_json::to_vec(&request)?);
            let reply: Reply = serde_json::from_slice(&bus.request(message, PATIENCE).await?.payload)?;
            ensure!(reply.exceptions.is_empty() && reply.streaming, "{reply:?}: {}", split.logs());
        }
        let state = SourceState { source, rev, count: who.len() as u64 };
        let heart = tokio::spawn(beat(std::sync::Arc::clone(&bus), name.clone(), state));
        Ok(Self { bus, messages, name, first, heart, table: table.to_owned() })
    }

    /// The next row of the table.
    pub(super) async fn next(&mut self) -> Result<Arrived> {
        loop {
            let message = tokio::time::timeout(PATIENCE, self.messages.next()).await.context("no row comes")?;
            let (message, when) = (message.context("the bus was closed")?, Instant::now());
            if message.subject.as_str().ends_with(".gap") {
                continue;
            }
            let change = IncomingChange::decode(&message.payload)?;
            if *change.table != *self.table {
                continue;
            }
            let data: Value = serde_json::from_str(change.data.get())?;
            let id = data["record"]["id"].as_i64().context("no id")?;
            return Ok(Arrived { id, subscribers: self.numbers(&change.allowed_sub_ids), when });
        }
    }

    /// The front's own; one that has left may be listed until the worker knows.
    fn numbers(&self, ids: &[SubId]) -> Vec<u64> {
        let mine = |id: &SubId| (id.0 % TWIN).checked_sub(self.first).filter(|n| *n < PER_FRONT);
        ids.iter().filter_map(mine).collect()
    }

    /// The worker forgets it at once.
    pub(super) async fn leave(self) -> Result<()> {
        let heartbeat = Heartbeat { front: self.name.clone(), sources: Vec::new(), leaving: true };
        let message = Message::new(Subject::front_heartbeats(), serde_json::to_vec(&heartbeat)?);
        Ok(self.bus.publish(message).await?)
    }
}

async fn source(split: &Split) -> Result<SourceId> {
    let platform = split.platform().client("platform").await?;
    let id: String = platform.query_one("select id::text from aura.sources", &[]).await?.get(0);
    Ok(id.parse()?)
}

fn registered(project: ProjectId, table: &str, id: u64, who: &Who) -> Result<Registered> {
    let spec = SubscriptionSpec {
        project,
        schema: "public".to_owned(),
        table: Some(table.to_owned()),
        event: EventFilter::All,
        filter: who.filter.clone(),
        select: None,
        role: "authenticated".to_owned(),
        claims: Claims::from_payload(&who.claims)?,
    };
    Ok(Registered { sub_id: SubId(id), twin: SubId(TWIN + id), spec })
}

async fn beat(bus: std::sync::Arc<NatsBus>, front: FrontId, state: SourceState) {
    let heartbeat = Heartbeat { front, sources: vec![state], leaving: false };
    let payload = serde_json::to_vec(&heartbeat).expect("it is JSON");
    let mut ticks = tokio::time::interval(HEARTBEAT);
    loop {
        ticks.tick().await;
        // The next one counts if this one is lost.
        let _ = bus.publish(Message::new(Subject::front_heartbeats(), payload.clone())).await;
    }
}
