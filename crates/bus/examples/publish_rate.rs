//! How fast one publisher is: `publish_rate [nats://…]`, batches of 1000 messages of 400 bytes with three headers on one
//! thread, then batches of one. Prints messages per second of wall time and of our own CPU time, and receipt times.
#![allow(clippy::print_stdout, clippy::cast_precision_loss)]

use std::time::{Duration, Instant};

use aura_bus::{Bus, BusError, Headers, Message, NatsBus, NatsOptions, Subject};
use aura_domain::{Epoch, ProjectId, SourceId};

const BATCH: usize = 1000;
const BATCHES: usize = 300;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BusError> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "nats://127.0.0.1:4222".to_owned());
    let bus = NatsBus::connect(NatsOptions::new(url, "publish_rate")).await?;
    let batch = vec![message(); BATCH];
    let (wall, cpu) = (Instant::now(), cpu_time());
    for _ in 0..BATCHES {
        bus.publish_batch(&batch).await?;
    }
    let rate = |spent: Duration| (BATCH * BATCHES) as f64 / spent.as_secs_f64();
    println!("{:.0} messages/s, {:.0} per CPU second", rate(wall.elapsed()), rate(cpu_time() - cpu));
    let mut singles = Vec::new();
    for _ in 0..2000 {
        let started = Instant::now();
        bus.publish_batch(&batch[..1]).await?;
        singles.push(started.elapsed());
    }
    singles.sort();
    println!("receipt of one: p50 {:?}, p99 {:?}", singles[singles.len() / 2], singles[singles.len() * 99 / 100]);
    Ok(())
}

fn message() -> Message {
    let project = ProjectId("6a0c2a2e-4f0a-4b62-9b5f-2f0f7e0d9c11".parse().unwrap_or_default());
    let source = SourceId("0b0e9d6e-0000-4000-8000-000000000001".parse().unwrap_or_default());
    let headers = Headers { origin: Some("worker-1".to_owned()), source: Some(source), epoch: Some(Epoch(1)) };
    Message { headers, ..Message::new(Subject::changes(project, "public", "messages"), vec![b'x'; 400]) }
}

/// CPU time of this process, in user and kernel mode, from fields 14 and 15 of `/proc/self/stat` in ticks of 10 ms.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks: u64 = stat.split(' ').skip(13).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}
