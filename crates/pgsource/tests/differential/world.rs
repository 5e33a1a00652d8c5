use anyhow::{Context, Result};
use aura_domain::{Image, SqlName};
use aura_pgsource::{FilterEntry, LogEvent, Plugin, ReplicationConnection, Sockets, SourceUrl, wal2json_options};

use super::{
    ROUNDS, Tally, claims,
    dice::Dice,
    oracle,
    policy::Words,
    round::Round,
    table::{self, Table},
};
use crate::{
    lab::{APP, PATIENCE, SLOT, Tail},
    tenant::{Tenants, relation},
};

/// What all worlds share.
pub(super) struct Stage {
    pub(super) tenants: Tenants,
    tail: Tail,
}

/// A table and the images of its rows' history.
pub(super) struct World {
    seed: u64,
    table: Table,
    oid: u32,
    images: Vec<Image>,
    script: Vec<String>,
}

impl Stage {
    pub(super) async fn start() -> Result<Self> {
        let tenants = Tenants::start().await?;
        tenants.run(oracle::SETUP).await?;
        let (url, sockets) = (SourceUrl::parse(&tenants.postgres.url("postgres"))?, Sockets::new());
        let connect = || ReplicationConnection::connect(&url, APP, &sockets, PATIENCE);
        let mut connection = connect().await?;
        let from = connection.create_slot(SLOT, Plugin::Wal2json).await?;
        connection.close().await;
        let options = wal2json_options(&[FilterEntry::Schema(SqlName::new("shop")?)]);
        let tail = Tail::new(connect().await?.start(SLOT, from, &options).await?, Plugin::Wal2json);
        Ok(Self { tenants, tail })
    }

    /// Prefix of the shop's roles.
    pub(super) fn roles(&self) -> String {
        format!("p_{}_", self.tenants.shop)
    }

    /// Everything that the log says of a table up to now.
    async fn images(&mut self, table: &str, marker: u64) -> Result<Vec<Image>> {
        self.tenants.run(&format!("insert into shop.marker values ({marker})")).await?;
        let mut images = Vec::new();
        loop {
            match self.tail.event().await? {
                LogEvent::Change(change) if &*change.relation.table == "marker" => {
                    // A server that hears nothing for a minute gives the stream up.
                    self.tail.confirm(change.position.change).await?;
                    return Ok(images);
                }
                LogEvent::Change(change) if *change.relation.table == *table => {
                    images.extend([change.old, change.new].into_iter().flatten());
                }
                LogEvent::Skipped { reason, relation } => anyhow::bail!("skipped: {reason:?} {relation:?}"),
                _ => {}
            }
        }
    }
}

impl World {
    pub(super) async fn make(stage: &mut Stage, seed: u64) -> Result<Self> {
        let mut dice = Dice::new(seed);
        let mut table = Table::random(&mut dice);
        let mut script = std::mem::take(&mut table.ddl);
        let words = Words { table: &table, roles: &stage.roles(), atom: 0 };
        script.extend(words.row_functions());
        script.push(table::members(&mut dice));
        script.extend(table.history(&mut dice));
        for statement in &script {
            stage.tenants.sql.batch_execute(statement).await.with_context(|| statement.clone())?;
        }
        let images = stage.images(&table.name, seed).await?;
        let oid = stage.tenants.oid(&relation("shop", &table.name)?).await?;
        Ok(Self { seed, table, oid, images, script })
    }

    /// One set of policies, grants and identities; says what differs from the server's own verdicts.
    pub(super) async fn round(&self, stage: &Stage, round: usize, tally: &mut Tally) -> Result<Option<String>> {
        let mut dice = Dice::new(self.seed * 1000 + round as u64);
        let (tenants, roles) = (&stage.tenants, stage.roles());
        tenants.superuser.batch_execute(&self.reset(&roles)).await?;
        let atom = self.seed as usize * ROUNDS + round;
        let words = Words { table: &self.table, roles: &roles, atom };
        let mut script = words.access(&mut dice);
        for statement in &script {
            tenants.superuser.batch_execute(statement).await.with_context(|| statement.clone())?;
        }
        for policy in words.policies(&mut dice) {
            tally.policies += 1;
            match tenants.superuser.batch_execute(&policy).await {
                Ok(()) => script.push(policy),
                // Random SQL is not always SQL.
                Err(_) => tally.refused_policies += 1,
            }
        }
        let identities = claims::identities(&mut dice);
        let round = Round::new(stage, &self.table, self.oid, &self.images, &identities).await?;
        let wrong = round.compare(&mut dice, tally).await?;
        if wrong.is_empty() {
            return Ok(None);
        }
        let script = self.script.iter().chain(&script).map(|statement| format!("{statement};\n"));
        let few: Vec<String> = wrong.iter().take(8).cloned().collect();
        let script = script.collect::<String>();
        Ok(Some(format!("seed {}: {} differences\n{}\n{script}", self.seed, wrong.len(), few.join("\n"))))
    }

    pub(super) async fn drop(&self, stage: &Stage) -> Result<()> {
        let sql = format!("{}; drop table {} cascade", self.reset(&stage.roles()), self.table.quoted());
        Ok(stage.tenants.superuser.batch_execute(&sql).await?)
    }

    /// Takes back what a round may have changed.
    fn reset(&self, roles: &str) -> String {
        let table = self.table.quoted();
        let all =
            ["anon", "authenticated", "editor", "service_role"].map(|word| format!("\"{roles}{word}\"")).join(", ");
        format!(
            "do $$ declare p record; begin
                 for p in select polname, polrelid::regclass as tab from pg_policy loop
                     execute format('drop policy %I on %s', p.polname, p.tab);
                 end loop;
             end $$;
             alter table {table} owner to aura_owner;
             alter table {table} disable row level security, no force row level security;
             revoke select on {table} from {all};
             grant select on {table}, shop.member to {all};
             grant usage on schema shop to {all};
             alter table shop.member disable row level security;
             alter role \"{roles}editor\" nobypassrls"
        )
    }
}
