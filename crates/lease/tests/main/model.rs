//! Workers and sources on a paused clock, under random faults: never two that may both believe to hold a lease, and
//! everything owned again soon after the faults stop.
//!
//! A seed gives the same faults again, not the same run: tokens and jitter are drawn anew. `AURA_MODEL_SEED` is the first
//! one, `AURA_MODEL_SEEDS` their number.

use std::{
    collections::HashMap,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard},
    task::Poll,
    time::Duration,
};

use aura_domain::WorkerId;
use aura_lease::{Guard, KubernetesLease, KubernetesOptions, LeaseBackend, LeaseConfig, run_with_lease};
use aura_testkit::{ClientSwitches, FakeKubernetes, Fault, On, eventually};
use futures_util::future::join_all;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tokio_util::sync::CancellationToken;

use crate::server::{local_client, options, stored};

const WORKERS: usize = 4;
const SOURCES: usize = 4;
const SEEDS: u64 = 6;
const DURATION: Duration = Duration::from_secs(15);
/// Of faults; two of them are about 2 s apart.
const ROUGH: Duration = Duration::from_secs(300);
/// After the faults: what was held by somebody who is gone expires, is noticed and taken. A paused worker comes back first.
const BOUND: Duration = Duration::from_secs(40);

/// What the platform database would hold of a source, and who believes to run it.
#[derive(Default)]
struct Source {
    epoch: u64,
    /// Accepted writes, as (epoch, worker).
    writes: Vec<(u64, usize)>,
    guards: HashMap<usize, Guard>,
}

struct World {
    fake: FakeKubernetes,
    sources: Vec<Mutex<Source>>,
}

impl World {
    fn source(&self, n: usize) -> MutexGuard<'_, Source> {
        self.sources[n].lock().expect("no panic")
    }

    /// Workers whose guard of a source is good now, also those that are stopped and can't look.
    fn owners(&self, source: usize) -> Vec<usize> {
        let source = self.source(source);
        source.guards.iter().filter(|(_, guard)| guard.check().is_ok()).map(|(worker, _)| *worker).collect()
    }

    fn check(&self, seed: u64) {
        for n in 0..SOURCES {
            let owners = self.owners(n);
            assert!(owners.len() <= 1, "seed {seed}: {owners:?} all hold source {n}: {}", stored(&self.fake, &name(n)));
        }
    }
}

fn name(source: usize) -> String {
    format!("source-{source}")
}

/// One worker, which can be stopped as SIGSTOP does.
struct Worker {
    number: usize,
    switches: ClientSwitches,
    running: watch::Sender<bool>,
    stop: CancellationToken,
}

impl Worker {
    fn start(world: &Arc<World>, number: usize) -> (Self, tokio::task::JoinHandle<()>) {
        let clocks: [fn() -> Timestamp; 3] = [
            Timestamp::now,
            || Timestamp::now() + SignedDuration::from_hours(1),
            || Timestamp::now() - SignedDuration::from_hours(1),
        ];
        let token = format!("w{number}");
        let options = KubernetesOptions { clock: clocks[number % 3], ..options() };
        let backend = Arc::new(KubernetesLease::new(local_client(&world.fake, &token), options));
        let (running, stop) = (watch::Sender::new(true), CancellationToken::new());
        let loops =
            (0..SOURCES).map(|source| lead(Arc::clone(world), Arc::clone(&backend), number, source, stop.clone()));
        let life = stoppable(join_all(loops), running.subscribe());
        let worker = Self { number, switches: world.fake.client(&token), running, stop };
        (worker, tokio::spawn(life))
    }

    fn pause(&self, paused: bool) {
        // Its watch is a task of its own: what it would hear comes when it goes on.
        self.switches.freeze(paused);
        self.running.send_replace(!paused);
    }
}

/// Polls the future only while `running`.
async fn stoppable(life: impl Future, mut running: watch::Receiver<bool>) {
    let mut life = pin!(life);
    loop {
        drop(running.wait_for(|running| *running).await);
        let stopped = {
            let mut stopped = pin!(running.wait_for(|running| !running));
            std::future::poll_fn(|context| {
                if stopped.as_mut().poll(context).is_ready() {
                    return Poll::Ready(true);
                }
                life.as_mut().poll(context).map(|_| false)
            })
            .await
        };
        if !stopped {
            return;
        }
    }
}

/// What a worker does about one source, as the product does it: lease, epoch, another look at the lease, fenced writes.
async fn lead(world: Arc<World>, backend: Arc<KubernetesLease>, me: usize, n: usize, stop: CancellationToken) {
    let holder = WorkerId(format!("worker-{me}"));
    let retry = Duration::from_secs(1);
    let config = LeaseConfig { name: name(n), holder: holder.clone(), duration: DURATION, retry };
    run_with_lease(&*backend, &config, stop.clone(), |_, guard| {
        let (world, backend, holder, stop) = (&world, &backend, &holder, stop.clone());
        async move {
            world.source(n).guards.insert(me, guard.clone());
            let epoch = {
                let mut source = world.source(n);
                source.epoch += 1;
                source.epoch
            };
            if backend.holder(&name(n)).await.is_ok_and(|found| found.is_some_and(|found| found.holder == *holder)) {
                write(world, n, me, epoch, &guard, &stop).await;
            }
            world.source(n).guards.remove(&me);
        }
    })
    .await;
}

/// Writes while the guard is good; a write of an older epoch is refused.
async fn write(world: &World, n: usize, me: usize, epoch: u64, guard: &Guard, stop: &CancellationToken) {
    while guard.check().is_ok() && !stop.is_cancelled() {
        {
            let mut source = world.source(n);
            if source.epoch != epoch {
                return;
            }
            source.writes.push((epoch, me));
        }
        tokio::select! {
            () = guard.lost().cancelled() => return,
            () = stop.cancelled() => {}
            () = sleep(Duration::from_millis(300)) => {}
        }
    }
}

/// One random fault.
fn break_something(world: &World, workers: &[Worker], random: &mut StdRng) {
    let worker = &workers[random.random_range(0..workers.len())];
    let (switches, seconds) = (&worker.switches, random.random_range(1..40));
    match random.random_range(0..13) {
        0 | 1 => switches.once(On::Write, Fault::ApplyAndDrop),
        2 => switches.once(On::Write, Fault::Drop),
        3 => switches.once(On::Write, Fault::Delay(Duration::from_secs(seconds))),
        4 => switches
            .once(On::Any, [Fault::ServerError, Fault::TooManyRequests, Fault::Unauthorized][seconds as usize % 3]),
        5 | 6 => later(switches, seconds, |switches| switches.fail(On::Any, Fault::Drop), ClientSwitches::heal),
        7 => later(switches, seconds, |switches| switches.fail(On::List, Fault::ServerError), ClientSwitches::heal),
        8 => switches.stale_lists(),
        9 => switches.cut_watches(),
        10 => {
            worker.pause(true);
            let (running, switches) = (worker.running.clone(), switches.clone());
            tokio::spawn(async move {
                sleep(Duration::from_secs(seconds)).await;
                switches.freeze(false);
                running.send_replace(true);
            });
        }
        11 => {
            let lease = stored(&world.fake, &name(random.random_range(0..SOURCES)));
            world.fake.delete("default", lease["metadata"]["name"].as_str().unwrap_or_default());
        }
        _ => world.fake.compact(),
    }
}

fn later(
    switches: &ClientSwitches,
    seconds: u64,
    begin: impl FnOnce(&ClientSwitches),
    end: impl FnOnce(&ClientSwitches) + Send + 'static,
) {
    begin(switches);
    switches.cut_watches();
    let switches = switches.clone();
    tokio::spawn(async move {
        sleep(Duration::from_secs(seconds)).await;
        end(&switches);
    });
}

async fn run(seed: u64) {
    let sources = (0..SOURCES).map(|_| Mutex::default()).collect();
    let world = Arc::new(World { fake: FakeKubernetes::new(), sources });
    let (workers, lives): (Vec<_>, Vec<_>) = (0..WORKERS).map(|number| Worker::start(&world, number)).unzip();
    let checking = {
        let world = Arc::clone(&world);
        async move {
            loop {
                world.check(seed);
                sleep(Duration::from_millis(20)).await;
            }
        }
    };
    let story = async {
        let everything_owned = async |workers: &[Worker]| {
            let living: Vec<_> = workers.iter().map(|worker| worker.number).collect();
            let owned = || async { (0..SOURCES).all(|n| world.owners(n).iter().any(|owner| living.contains(owner))) };
            eventually(BOUND, owned).await.unwrap_or_else(|_| panic!("seed {seed}: not everything is owned"));
        };
        everything_owned(&workers).await;
        let (mut random, end) = (StdRng::seed_from_u64(seed), Instant::now() + ROUGH);
        while Instant::now() < end {
            sleep(Duration::from_millis(random.random_range(100..4000))).await;
            break_something(&world, &workers, &mut random);
        }
        for worker in &workers {
            worker.pause(false);
            worker.switches.heal();
        }
        everything_owned(&workers).await;
        // A lease that was deleted a moment ago is still waited for.
        sleep(DURATION).await;
        everything_owned(&workers).await;
        hand_over(&world, &workers, seed).await;
    };
    tokio::select! {
        () = checking => {}
        () = story => {}
    }
    workers.iter().for_each(|worker| worker.stop.cancel());
    timeout(BOUND, join_all(lives)).await.unwrap_or_else(|_| panic!("seed {seed}: a worker does not stop"));
    for n in 0..SOURCES {
        let source = world.source(n);
        assert!(source.writes.is_sorted_by_key(|(epoch, _)| *epoch), "seed {seed}");
        let by_one = |pair: &[(u64, usize)]| pair[0].0 != pair[1].0 || pair[0].1 == pair[1].1;
        assert!(source.writes.windows(2).all(by_one), "seed {seed}: one epoch, one writer");
        assert!(source.epoch > 1 && source.guards.is_empty(), "seed {seed}: {}", source.epoch);
    }
}

/// A worker that leaves in order leaves its sources to the others at once.
async fn hand_over(world: &World, workers: &[Worker], seed: u64) {
    let leaving = world.owners(0)[0];
    workers[leaving].stop.cancel();
    let moved = || async { (0..SOURCES).all(|n| world.owners(n).iter().any(|owner| *owner != leaving)) };
    eventually(Duration::from_secs(3), moved).await.unwrap_or_else(|_| panic!("seed {seed}: no hand-over"));
}

#[tokio::test(start_paused = true)]
async fn r_lease_1_never_two_guards_and_all_owned_again_after_faults() {
    let number = |variable: &str| std::env::var(variable).ok().map(|text| text.parse().expect("a number"));
    let first: u64 = number("AURA_MODEL_SEED").unwrap_or(0);
    for seed in first..first + number("AURA_MODEL_SEEDS").unwrap_or(SEEDS) {
        run(seed).await;
    }
}
