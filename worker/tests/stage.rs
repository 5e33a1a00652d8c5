//! A source and a platform database in one throw-away cluster, one project, and workers that come and go.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use aura_bus::{MemoryBus, Message, SharedBus, Subject, Subscription};
use aura_domain::{
    Claims, EngineReport, EngineState, EventFilter, FrontId, OnDeadline, ProjectId, Relation, SqlName, SubscriptionSpec,
};
use aura_kit::ShutdownHandle;
use aura_pgsource::{
    SourceUrl,
    admin::{Admin, Leaf},
};
use aura_store::{
    Caller, CreatedProject, Engine, FoundPartition, MasterKey, NewProject, NewRegistration, NewSource, Plugin,
    PostgresLease, RegistrationMode, ReplicaIdentity, SlotRecreate, Source, StartRequest, Store, TableRef,
};
use aura_testkit::{Postgres, SlotWatch, eventually, eventually_some};
use aura_wire::{
    IncomingChange,
    control::{Reply, Request, Subscription as WireSubscription},
};
use aura_worker::{Desk, Worker, WorkerDeps, WorkerSettings, WorkerStatus};
use axum::Router;
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio_postgres::Client;

pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// Of platform keys.
pub(crate) const PLATFORM_SECRET: &str = "a platform secret of 32 bytes and more";
/// Who asks in these tests.
pub(crate) const CALLER: Caller<'static> = Caller { actor: "test", request_id: None };

pub(crate) struct Stage {
    pub(crate) postgres: Postgres,
    pub(crate) store: Store,
    pub(crate) admin: Admin,
    pub(crate) bus: SharedBus,
    pub(crate) source: Source,
    pub(crate) project: ProjectId,
    pub(crate) schema: SqlName,
    /// Superuser in the source database, `search_path` at the project's schema.
    pub(crate) sql: Client,
    /// Of the workers that start from now on.
    pub(crate) settings: WorkerSettings,
    /// They reach the platform database through this port.
    pub(crate) platform_port: u16,
    rev: u64,
    /// Of each joined subscription its id and its claim-less twin's, which is named where row security is off.
    pub(crate) twins: Vec<(u64, u64)>,
}

/// A worker on a runtime of its own, so that it can be killed with all its tasks.
pub(crate) struct Running {
    pub(crate) status: WorkerStatus,
    pub(crate) desk: Desk,
    /// Its `/engine` routes.
    pub(crate) routes: Router,
    pub(crate) shutdown: ShutdownHandle,
    task: tokio::task::JoinHandle<Vec<EngineReport>>,
    runtime: Option<Runtime>,
}

impl Running {
    pub(crate) async fn stop(mut self) -> Vec<EngineReport> {
        self.shutdown.trigger();
        (&mut self.task).await.expect("the worker ends in order")
    }

    /// As near to kill -9 as a thread comes: no task of it runs on.
    pub(crate) fn kill(self) {}
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// What a subscriber to the bus has seen.
#[derive(Debug, Clone)]
pub(crate) struct Seen {
    pub(crate) seq: u64,
    pub(crate) ids: Vec<u64>,
    pub(crate) data: Value,
}

impl Stage {
    pub(crate) async fn new(plugin: Plugin) -> anyhow::Result<Self> {
        Self::on(Postgres::start().await?, plugin).await
    }

    pub(crate) async fn on(postgres: Postgres, plugin: Plugin) -> anyhow::Result<Self> {
        let (platform, app) = (postgres.create_database("platform").await?, postgres.create_database("app").await?);
        aura_store::migrate(&platform).await?;
        let key = MasterKey::new("a master key that is long enough for tests").expect("long enough");
        let store = Store::connect(&platform, key).await?;
        let sql = postgres.client("app").await?;
        sql.batch_execute("create role aura_worker login replication password 'secret'").await?;
        let source = store
            .upsert_source(NewSource {
                name: "shared".to_owned(),
                replication_url: postgres.url_as("aura_worker", "secret", "app").into(),
                admin_url: Some(app.clone().into()),
                slot_name: None,
                plugin,
                slot_recreate: SlotRecreate::Auto,
            })
            .await?;
        let admin = Admin::connect(&SourceUrl::parse(&app)?).await?;
        admin.bootstrap().await?;
        let new = NewProject {
            id: None,
            name: "demo".to_owned(),
            source: source.id,
            schema: None,
            settings: Default::default(),
        };
        let CreatedProject { project, secrets, .. } = store.create_project(new, "test").await?;
        admin.provision_project(project.id, &project.schema, &[], &secrets.visibility_password).await?;
        sql.batch_execute(&format!("set search_path = {}", project.schema.quoted())).await?;
        let bus: SharedBus = Arc::new(MemoryBus::new());
        let settings = WorkerSettings { lease_duration: Duration::from_secs(3), ..WorkerSettings::default() };
        let (project, schema) = (project.id, project.schema);
        let platform_port = postgres.port();
        Ok(Self {
            postgres,
            store,
            admin,
            bus,
            source,
            project,
            schema,
            sql,
            settings,
            platform_port,
            rev: 0,
            twins: Vec::new(),
        })
    }

    /// The worker's connections to the source go to this port from now on.
    pub(crate) async fn reach_source_through(&mut self, port: u16) -> anyhow::Result<()> {
        let url = self.through(port, &self.postgres.url_as("aura_worker", "secret", "app"));
        self.source = self
            .store
            .upsert_source(NewSource {
                name: self.source.name.clone(),
                replication_url: url.into(),
                admin_url: None,
                slot_name: None,
                plugin: self.source.plugin,
                slot_recreate: self.source.slot_recreate,
            })
            .await?;
        Ok(())
    }

    fn through(&self, port: u16, url: &str) -> String {
        url.replace(&format!(":{}/", self.postgres.port()), &format!(":{port}/"))
    }

    pub(crate) async fn set_slot_recreate(&mut self, slot_recreate: SlotRecreate) -> anyhow::Result<()> {
        let new = NewSource {
            name: self.source.name.clone(),
            replication_url: self.source.replication_url.clone(),
            admin_url: None,
            slot_name: None,
            plugin: self.source.plugin,
            slot_recreate,
        };
        self.source = self.store.upsert_source(new).await?;
        Ok(())
    }

    /// The engine's row.
    pub(crate) async fn engine(&self) -> Engine {
        self.store.engine(self.source.id).await.expect("read").expect("it is there")
    }

    /// Waits until the row is in the state.
    pub(crate) async fn reaches(&self, state: EngineState) -> anyhow::Result<Engine> {
        eventually_some(PATIENCE, || async {
            let engine = self.engine().await;
            (engine.state == state).then_some(engine)
        })
        .await
        .with_context(|| format!("{state} is not reached"))
    }

    /// Asks for a stop and waits for its end, with the time that it took.
    pub(crate) async fn stop(
        &self,
        deadline_ms: u64,
        on_deadline: OnDeadline,
    ) -> anyhow::Result<(EngineReport, Duration)> {
        let began = Instant::now();
        let deadline = Duration::from_millis(deadline_ms);
        self.store.request_stop(self.source.id, deadline, on_deadline, CALLER).await?;
        let engine = self.reaches(EngineState::Stopped).await?;
        Ok((engine.last_report.context("a report")?, began.elapsed()))
    }

    pub(crate) async fn start(&self) -> anyhow::Result<()> {
        let started = self.store.request_start(self.source.id, CALLER).await?;
        anyhow::ensure!(started == StartRequest::Accepted, "{started:?}");
        self.reaches(EngineState::Running).await.map(drop)
    }

    pub(crate) async fn slot(&self) -> SlotWatch {
        self.postgres.slot(&self.source.slot_name).await.expect("connected")
    }

    /// The server process of the stream.
    pub(crate) async fn walsender(&self) -> anyhow::Result<i32> {
        let sql = "select active_pid from pg_replication_slots where slot_name = $1 and active";
        Ok(self.sql.query_one(sql, &[&self.source.slot_name]).await?.get(0))
    }

    /// Server processes of engines of this source.
    pub(crate) async fn backends(&self) -> i64 {
        let sql = "select count(*) from pg_stat_activity where application_name like 'aura-cdc:%'";
        let client = self.postgres.client("postgres").await.expect("connected");
        client.query_one(sql, &[]).await.expect("read").get(0)
    }

    pub(crate) async fn worker(&self) -> Running {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
        let settings = self.settings.clone();
        let url = self.through(self.platform_port, &self.postgres.url("platform"));
        let key = self.store.master_key().clone();
        let store =
            runtime.spawn(async move { Store::connect(&url, key).await }).await.expect("no panic").expect("connected");
        let lease = Arc::new(PostgresLease::new(&store));
        let worker = Worker::new(WorkerDeps { store, bus: Arc::clone(&self.bus), lease, settings: settings.clone() });
        let (status, desk) = (worker.status(), worker.desk());
        let routes = worker.routes(Some(PLATFORM_SECRET.into()));
        let shutdown = ShutdownHandle::new(settings.drain_timeout);
        let task = runtime.spawn(worker.run(shutdown.clone()));
        Running { status, desk, routes, task, shutdown, runtime: Some(runtime) }
    }

    pub(crate) async fn run_worker(&self) -> Running {
        let running = self.worker().await;
        eventually(PATIENCE, || async { running.status.cdc_active() }).await.expect("the engine runs");
        running
    }

    /// What the api does for a PUT `{"enabled": true}`, up to its 200.
    pub(crate) async fn enable(&self, table: &str) -> anyhow::Result<()> {
        self.register(table).await?;
        let name = SqlName::new(table)?;
        let table = TableRef { project: self.project, schema: &self.schema, table: &name };
        eventually(PATIENCE, || async {
            let row = self.store.registration(table).await.ok().flatten();
            row.is_some_and(|row| row.active_since_lsn.is_some())
        })
        .await
    }

    /// The same, up to a 202: no worker has applied it yet.
    pub(crate) async fn register(&self, table: &str) -> anyhow::Result<()> {
        self.register_in(table, RegistrationMode::Auto).await
    }

    pub(crate) async fn register_in(&self, table: &str, mode: RegistrationMode) -> anyhow::Result<()> {
        let name = SqlName::new(table)?;
        let relation = Relation { schema: self.schema.clone(), table: name.clone() };
        let info = self.admin.table(&self.schema, &name).await?.expect("the table is there");
        let table = TableRef { project: self.project, schema: &self.schema, table: &name };
        let identity = ReplicaIdentity { kind: info.replica_identity, index: None };
        let partition = |leaf: &Leaf| FoundPartition {
            oid: leaf.oid,
            relation: leaf.relation.clone(),
            identity: ReplicaIdentity { kind: leaf.replica_identity, index: leaf.identity_index.clone() },
        };
        let partitions: Vec<_> = info.leaves.iter().map(partition).collect();
        let new = NewRegistration {
            table,
            source: self.source.id,
            oid: info.oid,
            mode,
            identity: (mode == RegistrationMode::Auto).then_some(&identity),
            partitions: &partitions,
            actor: "test",
            request_id: None,
        };
        let registration = self.store.enable_table(new).await?;
        let change = self.admin.set_replica_identity_full(&relation, info.oid, Duration::from_secs(3)).await?;
        let generation = self.store.engine(self.source.id).await?.expect("it is there").generation;
        self.store.identity_set(registration.id, None, change.lsn, generation).await?;
        Ok(())
    }

    pub(crate) async fn disable(&self, table: &str) -> anyhow::Result<()> {
        let name = SqlName::new(table)?;
        let table = TableRef { project: self.project, schema: &self.schema, table: &name };
        let lsn = self.admin.current_wal_insert_lsn().await?;
        let row = self.store.disable_table(table, lsn, "test", None).await?.expect("it was registered");
        eventually(PATIENCE, || async {
            let engine = self.store.engine(self.source.id).await.ok().flatten();
            engine.is_some_and(|engine| engine.applied_revision >= row.revision)
        })
        .await
    }

    pub(crate) async fn changes(&self) -> Watch {
        let subject = Subject::project_tree(self.project);
        Watch { messages: self.bus.subscribe(&subject).await.expect("subscribed"), gaps: Vec::new() }
    }

    /// Joins as a front would; `*` is the whole schema.
    pub(crate) async fn join(&mut self, table: &str, role: &str, claims: Value, filter: Option<&str>) -> (u64, Reply) {
        let subscription = self.subscription(table, role, &claims, filter);
        let sub_id = subscription.sub_id.0;
        (sub_id, self.join_at_once(vec![subscription]).await)
    }

    /// One request of a front, which waits as long for the answer.
    pub(crate) async fn join_at_once(&mut self, subscriptions: Vec<WireSubscription>) -> Reply {
        self.rev += 1;
        let request = Request::Join { front: FrontId("front".to_owned()), rev: self.rev, subscriptions };
        let payload = serde_json::to_vec(&request).expect("JSON");
        let message = Message::new(Subject::source_requests(self.source.id), payload);
        let answer = self.bus.request(message, Duration::from_secs(5)).await.expect("the leader answers");
        serde_json::from_slice(&answer.payload).expect("a reply")
    }

    /// Of the stage's project.
    pub(crate) fn subscription(
        &mut self,
        table: &str,
        role: &str,
        claims: &Value,
        filter: Option<&str>,
    ) -> WireSubscription {
        let spec = SubscriptionSpec {
            project: self.project,
            schema: "public".to_owned(),
            table: (table != "*").then(|| table.to_owned()),
            event: EventFilter::All,
            filter: filter.map(str::to_owned),
            select: None,
            role: role.to_owned(),
            claims: Claims::from_payload(claims).expect("an object"),
        };
        let key = self.store.master_key().sub_id_key();
        let (sub_id, twin) = (key.sub_id(&spec), key.twin(&spec));
        self.twins.push((sub_id.0, twin.0));
        WireSubscription { sub_id, twin, spec }
    }
}

/// The bus as a subscriber sees it.
pub(crate) struct Watch {
    messages: Subscription,
    pub(crate) gaps: Vec<Value>,
}

impl Watch {
    /// The next change.
    pub(crate) async fn next(&mut self) -> Seen {
        loop {
            let message = tokio::time::timeout(PATIENCE, self.messages.next()).await.expect("in time").expect("open");
            if message.subject.as_str().ends_with(".gap") {
                self.gaps.push(serde_json::from_slice(&message.payload).expect("JSON"));
                continue;
            }
            return seen(&message);
        }
    }

    /// The next gap; changes before it are passed over.
    pub(crate) async fn next_gap(&mut self) -> Value {
        loop {
            let message = tokio::time::timeout(PATIENCE, self.messages.next()).await.expect("in time").expect("open");
            if message.subject.as_str().ends_with(".gap") {
                return serde_json::from_slice(&message.payload).expect("JSON");
            }
        }
    }
}

fn seen(message: &Message) -> Seen {
    let change = IncomingChange::decode(&message.payload).expect("an envelope");
    let data = serde_json::from_str(change.data.get()).expect("JSON");
    Seen { seq: change.seq, ids: change.allowed_sub_ids.iter().map(|id| id.0).collect(), data }
}
