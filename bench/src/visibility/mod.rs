//! `make bench-visibility`: what row security costs per (row, subscriber), and what others notice when somebody's fails.
//!
//! The table is that of the peer's recorded figures: 7 columns, a body of 100 bytes, the rows' owners spread over the
//! subscribers, each with claims of its own and the role `authenticated`; `jit` and `fsync` are off.

pub(crate) mod check;
mod cpu;
pub(crate) mod engine;
mod front;
pub(crate) mod isolation;

use aura_testkit::PostgresOptions;
use serde_json::{Value, json};

/// Which of the figures' cells, and how often.
#[derive(Debug, Clone, clap::Args)]
#[group(skip)]
pub(crate) struct Options {
    /// Subscribers, each with claims of its own.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 10, 100, 1000])]
    subscribers: Vec<usize>,
    /// Rows of a batch, of a transaction.
    #[arg(long, value_delimiter = ',', default_values_t = [100, 1000])]
    batches: Vec<usize>,
    /// Rounds of each cell; the median counts.
    #[arg(long, default_value_t = 3)]
    visibility_rounds: usize,
    /// Length of the isolation figure; the baseline before it is a third of that.
    #[arg(long, default_value_t = 300)]
    isolation_seconds: u64,
}

/// A policy whose cost is measured.
#[derive(Debug, Clone, Copy)]
struct Policy {
    name: &'static str,
    using: &'static str,
    /// The peer's CPU-µs per check at 100 and 1000 subscribers.
    peer: Peer,
}

/// What the peer needs for one check, at 100 subscribers and at 1000: recorded on this kind of machine, by the scheduler's
/// count of its polling process (PostgreSQL 15, `jit` and `fsync` off), not measured in this run.
#[derive(Debug, Clone, Copy)]
struct Peer {
    at_100: f64,
    at_1000: Option<f64>,
}

const PLAIN: Policy = Policy {
    name: "plain",
    using: "owner_id = (current_setting('request.jwt.claims')::json->>'sub')::uuid",
    peer: Peer { at_100: 32.0, at_1000: Some(21.5) },
};
const POLICIES: [Policy; 4] = [
    PLAIN,
    Policy {
        name: "select",
        using: "owner_id = (select (current_setting('request.jwt.claims')::json->>'sub')::uuid)",
        peer: Peer { at_100: 31.8, at_1000: Some(20.6) },
    },
    Policy { name: "auth.uid()", using: "owner_id = auth.uid()", peer: Peer { at_100: 30.2, at_1000: None } },
    Policy {
        name: "membership",
        using: "exists (select 1 from member m where m.room_id = item.room_id \
                and m.user_id = (current_setting('request.jwt.claims')::json->>'sub')::uuid)",
        peer: Peer { at_100: 152.0, at_1000: None },
    },
];

/// Changes per second of the peer at 100 and 1000 subscribers, recorded as [`Peer`].
const PEER_CHANGES: [(usize, f64); 2] = [(100, 312.0), (1000, 46.0)];

impl Policy {
    /// The peer's µs per check over ours.
    fn ratio(&self, subscribers: usize, ours: f64) -> Value {
        let peer = match subscribers {
            100 => Some(self.peer.at_100),
            1000 => self.peer.at_1000,
            _ => None,
        };
        peer.map_or(Value::Null, |peer| json!({"peer_recorded_us": peer, "times_less": rounded(peer / ours)}))
    }
}

/// In the schema that the session's search path names.
const TABLES: &str = "
    create table item (id bigint primary key, owner_id uuid not null, room_id int not null, title text, body text,
        done bool not null default false, created_at timestamptz not null default now());
    create table member (room_id int, user_id uuid, primary key (room_id, user_id));
    create index on member (user_id);
    alter table item enable row level security";

/// Rooms; each subscriber is in the one that his rows are in.
const ROOMS: usize = 50;

/// `sub` of the n-th subscriber.
fn user(n: usize) -> String {
    format!("00000000-0000-4000-8000-{n:012x}")
}

/// The settings of the peer's figures.
fn postgres() -> PostgresOptions {
    PostgresOptions::default().setting("jit", "off").setting("shared_buffers", "256MB")
}

/// Median, least and most.
fn spread(values: &[f64]) -> Value {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |n: usize| sorted.get(n).copied().map(rounded);
    json!({"median": at(sorted.len() / 2), "least": at(0), "most": at(sorted.len().saturating_sub(1))})
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
}

/// To three significant digits after the leading zeros.
fn rounded(value: f64) -> f64 {
    let scale = 10_f64.powi(3 - value.abs().max(1e-9).log10().ceil() as i32);
    (value * scale).round() / scale
}
