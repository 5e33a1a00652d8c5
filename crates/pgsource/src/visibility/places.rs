//! Places for visibility connections, fair between projects (R-RLS-9): whoever waits gets one before those of projects
//! that have more.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aura_domain::ProjectId;
use tokio::sync::oneshot;

/// All places of a source.
#[derive(Clone)]
pub(super) struct Places(Arc<Mutex<Queue>>);

struct Queue {
    max: usize,
    free: usize,
    /// Counts those who waited.
    arrivals: u64,
    /// Those that have places or wait for some.
    projects: HashMap<ProjectId, Demand>,
}

#[derive(Default)]
struct Demand {
    held: usize,
    /// One of them is a probe's.
    probing: bool,
    waiting: VecDeque<Waiter>,
}

struct Waiter {
    arrival: u64,
    place: oneshot::Sender<Place>,
}

/// A place for one connection. Dropped, it is the next one's.
pub(super) struct Place {
    project: ProjectId,
    probe: bool,
    /// `None`: nobody has it.
    places: Option<Places>,
}

impl Places {
    pub(super) fn new(max: usize) -> Self {
        Self(Arc::new(Mutex::new(Queue { max, free: max, arrivals: 0, projects: HashMap::new() })))
    }

    /// How many are taken.
    pub(super) fn taken(&self) -> usize {
        let queue = self.lock();
        queue.max - queue.free
    }

    /// Waits for a place. Cancel-safe.
    pub(super) async fn take(&self, project: ProjectId) -> Option<Place> {
        let (sender, receiver) = oneshot::channel();
        {
            let mut queue = self.lock();
            queue.arrivals += 1;
            let arrival = queue.arrivals;
            let waiting = &mut queue.projects.entry(project).or_default().waiting;
            waiting.retain(|waiter| !waiter.place.is_closed());
            waiting.push_back(Waiter { arrival, place: sender });
            self.serve(&mut queue);
        }
        receiver.await.ok()
    }

    /// A place for a probe, which nobody waits for: only one that is free now, and one of a project at a time.
    pub(super) fn spare(&self, project: ProjectId) -> Option<Place> {
        let mut queue = self.lock();
        let (free, share) = (queue.free, queue.share());
        let probing = queue.projects.get(&project).is_some_and(|demand| demand.probing || demand.held >= share);
        if free == 0 || probing {
            return None;
        }
        let demand = queue.projects.entry(project).or_default();
        demand.probing = true;
        demand.held += 1;
        queue.free -= 1;
        Some(Place { project, probe: true, places: Some(self.clone()) })
    }

    fn serve(&self, queue: &mut Queue) {
        while queue.free > 0 {
            let Some((project, waiter)) = queue.next() else { return };
            let place = Place { project, probe: false, places: Some(self.clone()) };
            match waiter.place.send(place) {
                Ok(()) => {
                    queue.projects.entry(project).or_default().held += 1;
                    queue.free -= 1;
                }
                // Whoever waited has left. Giving it back would wait for the lock that is held here.
                Err(mut place) => place.places = None,
            }
        }
    }

    fn release(&self, project: ProjectId, probe: bool) {
        let mut queue = self.lock();
        queue.free += 1;
        if let Some(demand) = queue.projects.get_mut(&project) {
            demand.held -= 1;
            demand.probing &= !probe;
        }
        self.serve(&mut queue);
        queue.projects.retain(|_, demand| demand.held > 0 || !demand.waiting.is_empty());
    }

    /// Consistent at every step, so a panic elsewhere doesn't matter.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Queue {
    /// What a project has at most: half of them, so that a slow one leaves room for others.
    fn share(&self) -> usize {
        self.max.div_ceil(2)
    }

    /// Takes who has waited longest among the projects that have least.
    fn next(&mut self) -> Option<(ProjectId, Waiter)> {
        let share = self.share();
        let open = self.projects.iter_mut().filter(|(_, demand)| demand.held < share);
        let first = open.filter_map(|(project, demand)| {
            let arrival = demand.waiting.front()?.arrival;
            Some((demand.held, arrival, *project, demand))
        });
        let (_, _, project, demand) = first.min_by_key(|(held, arrival, ..)| (*held, *arrival))?;
        Some((project, demand.waiting.pop_front()?))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if let Some(places) = self.places.take() {
            places.release(self.project, self.probe);
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, future::BoxFuture};

    use super::*;

    fn project(n: u8) -> ProjectId {
        format!("00000000-0000-4000-8000-0000000000{n:02}").parse().expect("an id")
    }

    /// Stands in the queue from now on.
    fn wait(places: &Places, n: u8) -> BoxFuture<'static, Option<Place>> {
        let places = places.clone();
        let mut waits = async move { places.take(project(n)).await }.boxed();
        assert!((&mut waits).now_or_never().is_none(), "nothing is free for {n}");
        waits
    }

    fn take(places: &Places, n: u8) -> Place {
        places.take(project(n)).now_or_never().flatten().expect("a free place")
    }

    #[test]
    fn r_rls_9_a_project_that_waits_comes_before_one_that_has_more() {
        let places = Places::new(4);
        let mut busy = vec![take(&places, 1), take(&places, 1), take(&places, 2), take(&places, 2)];
        let (mut more, mut honest, mut later) = (wait(&places, 1), wait(&places, 3), wait(&places, 4));
        busy.truncate(3);
        let honest = (&mut honest).now_or_never().flatten();
        assert!(honest.is_some() && (&mut later).now_or_never().is_none());
        busy.truncate(2);
        let later = (&mut later).now_or_never().flatten();
        assert!(later.is_some() && (&mut more).now_or_never().is_none());
        drop(honest);
        assert!((&mut more).now_or_never().is_none(), "it has its half");
        busy.truncate(1);
        assert!((&mut more).now_or_never().flatten().is_some());
    }

    #[test]
    fn r_rls_9_a_place_is_never_lost() {
        let places = Places::new(2);
        let first = take(&places, 1);
        let (left, got) = (wait(&places, 1), wait(&places, 1));
        drop(left);
        drop(first);
        assert_eq!(places.taken(), 1, "the one who is still there has it");
        // Who has it and never looks gives it back.
        drop(got);
        assert_eq!(places.taken(), 0);
        assert!(places.lock().projects.is_empty());
    }

    #[test]
    fn r_rls_9_probes_take_only_what_is_free_and_one_per_project() {
        let places = Places::new(4);
        let probe = places.spare(project(1)).expect("a free place");
        assert!(places.spare(project(1)).is_none() && places.spare(project(2)).is_some());
        let checks = [take(&places, 1), take(&places, 2), take(&places, 2)];
        assert!(places.spare(project(3)).is_none(), "nothing is free");
        drop(checks);
        drop(probe);
        assert!(places.spare(project(1)).is_some());
    }
}
