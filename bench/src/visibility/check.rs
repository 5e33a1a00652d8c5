//! What one check costs, the pool called directly: what the worker spends besides, on reading and encoding, isn't in it.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use aura_domain::{Cell, Claims, Image, ProjectId, Relation, SqlName, Value};
use aura_pgsource::{CheckOutcome, CheckRequest, Identity, Sockets, SourceUrl, Verdict, VisibilityPool, admin::Admin};
use aura_testkit::Postgres;
use secrecy::SecretString;
use serde_json::json;
use tokio_postgres::Client;

use super::{
    Options, POLICIES, Policy, ROOMS, TABLES,
    cpu::{Backends, process_ns},
    postgres, spread, user,
};
use crate::{show, summary};

/// A round lasts at least so long, and for so many checks.
const ROUND: Duration = Duration::from_millis(400);
const CHECKS: usize = 3;
const SCHEMA: &str = "bench";
const PASSWORD: &str = "visibility";
/// The pool's own connections.
const POOL: &str = "application_name in ('aura-visibility', 'aura-bench-pool')";

struct Lab {
    _postgres: Postgres,
    sql: Client,
    pool: VisibilityPool,
    project: ProjectId,
    password: SecretString,
    relation: Relation,
    oid: u32,
}

pub(crate) async fn run(options: &Options) -> Result<()> {
    let lab = Lab::start().await?;
    for policy in POLICIES {
        lab.policy(policy).await?;
        for &subscribers in &options.subscribers {
            lab.members(subscribers).await?;
            for &rows in &options.batches {
                show(&lab.cell(policy, subscribers, rows, options.visibility_rounds).await?);
            }
        }
    }
    Ok(())
}

impl Lab {
    async fn start() -> Result<Self> {
        let postgres = Postgres::start_with(postgres()).await?;
        let sql = postgres.client("postgres").await?;
        let url = SourceUrl::parse(&postgres.url("postgres"))?;
        let admin = Admin::connect(&url).await?;
        admin.bootstrap().await?;
        let (project, password) = ("be4c0000-0000-4000-8000-000000000001".parse()?, SecretString::from(PASSWORD));
        let schema = SqlName::new(SCHEMA)?;
        admin.provision_project(project, &schema, &[], &password).await?;
        sql.batch_execute(&format!("set search_path to {SCHEMA}; {TABLES}")).await?;
        let relation = Relation { schema: schema.clone(), table: SqlName::new("item")? };
        let oid = admin.table(&relation.schema, &relation.table).await?.context("no such table")?.oid;
        let pool = VisibilityPool::new(url, Sockets::new(), "aura-bench-pool".to_owned(), 16);
        Ok(Self { _postgres: postgres, sql, pool, project, password, relation, oid })
    }

    async fn policy(&self, policy: Policy) -> Result<()> {
        let sql =
            format!("drop policy if exists p on item; create policy p on item for select using ({})", policy.using);
        Ok(self.sql.batch_execute(&sql).await?)
    }

    async fn members(&self, subscribers: usize) -> Result<()> {
        let rows: Vec<String> = (0..subscribers).map(|n| format!("({}, '{}')", n % ROOMS, user(n))).collect();
        let sql = format!("truncate member; insert into member values {}; analyze member", rows.join(", "));
        Ok(self.sql.batch_execute(&sql).await?)
    }

    async fn cell(&self, policy: Policy, subscribers: usize, rows: usize, rounds: usize) -> Result<serde_json::Value> {
        let images: Vec<Image> = (0..rows).map(|n| image(n, subscribers)).collect();
        let images: Vec<&Image> = images.iter().collect();
        let identities = (0..subscribers).map(identity).collect::<Result<Vec<_>>>()?;
        let backends = Backends::new(&self.sql, POOL);
        let verify = |outcome: &CheckOutcome| right(policy, outcome, rows, subscribers);
        // Connections are opened, catalogue and plans read.
        verify(&self.check(&images, &identities).await?)?;
        let (mut us, mut server, mut millis) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            let (own, theirs, began) = (process_ns(std::process::id())?, backends.now().await?, Instant::now());
            let mut checks = 0;
            while checks < CHECKS || began.elapsed() < ROUND {
                let began = Instant::now();
                let outcome = self.check(&images, &identities).await?;
                millis.push(began.elapsed().as_secs_f64() * 1e3);
                ensure!(outcome.verdicts.len() == subscribers, "a verdict is missing");
                checks += 1;
            }
            let pairs = (checks * rows * subscribers) as f64;
            let (own, theirs) = (process_ns(std::process::id())? - own, backends.since(&theirs).await?);
            us.push((own + theirs) as f64 / 1e3 / pairs);
            server.push(theirs as f64 / 1e3 / pairs);
        }
        verify(&self.check(&images, &identities).await?)?;
        Ok(json!({
            "figure": "visibility_check", "policy": policy.name, "subscribers": subscribers, "rows": rows,
            "cpu_us_per_check": spread(&us), "of_it_the_server": spread(&server), "batch": summary(millis),
            "peer": policy.ratio(subscribers, super::median(&us)),
        }))
    }

    async fn check(&self, images: &[&Image], identities: &[Identity]) -> Result<CheckOutcome> {
        let request = CheckRequest {
            wanted: None,
            project: self.project,
            password: &self.password,
            relation: &self.relation,
            registered_oid: self.oid,
            xids: &[],
            images,
            identities,
            extra_roles: &[],
        };
        Ok(self.pool.check(request).await?)
    }
}

/// Each row is its owner's, or his room's members'.
fn right(policy: Policy, outcome: &CheckOutcome, rows: usize, subscribers: usize) -> Result<()> {
    for (who, verdict) in outcome.verdicts.iter().enumerate() {
        let Verdict::Decided { visible, .. } = verdict else { anyhow::bail!("{}: {verdict:?}", policy.name) };
        let same = |owner: usize| owner == who || policy.name == "membership" && owner % ROOMS == who % ROOMS;
        let wanted: Vec<bool> = (0..rows).map(|row| same(row % subscribers)).collect();
        ensure!(*visible == wanted, "{}: the verdicts are wrong", policy.name);
    }
    Ok(())
}

fn identity(n: usize) -> Result<Identity> {
    let claims = Claims::from_payload(&json!({"sub": user(n), "role": "authenticated", "aud": "authenticated"}))?;
    Ok(Identity { role: "authenticated".to_owned(), claims })
}

fn image(n: usize, subscribers: usize) -> Image {
    let owner = n % subscribers;
    let cells = [
        ("id", n.to_string()),
        ("owner_id", user(owner)),
        ("room_id", (owner % ROOMS).to_string()),
        ("title", format!("item {n}")),
        ("body", "x".repeat(100)),
        ("done", "f".to_owned()),
        ("created_at", "2026-11-30 12:00:00+00".to_owned()),
    ];
    let cell = |(name, text): (&str, String)| Cell { name: name.into(), type_oid: 0, value: Value::Text(text.into()) };
    Image(cells.into_iter().map(cell).collect())
}
