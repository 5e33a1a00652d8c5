//! Whose loss is announced next: a queue for each project, so that one that the bus refuses delays no other. No clock and
//! no bus: whoever announces says what came of it.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use aura_domain::ProjectId;
use aura_flow::Admission;

use super::gaps::{Loss, Refusal};

/// First and longest pause between two tries of a project.
const PAUSE: (Duration, Duration) = (Duration::from_millis(20), Duration::from_secs(1));
/// More than this between two tries says that this process slept, or that the bus was silent: no refusal lasted so long.
const ASLEEP: Duration = Duration::from_secs(5);

/// The losses of all projects.
#[derive(Debug, Default)]
pub(super) struct Queues {
    projects: BTreeMap<ProjectId, Queue>,
    turns: u64,
}

/// The losses of one project, in order.
#[derive(Debug, Default)]
struct Queue {
    losses: VecDeque<Loss>,
    /// When it was last its turn.
    turn: u64,
    pause: Duration,
    /// Not before.
    due: Option<Instant>,
    refused: Option<Refused>,
}

/// The first one was refused, and by a bus that can be reached.
#[derive(Debug)]
struct Refused {
    lasts: Duration,
    last: Instant,
    /// The bus's last words.
    reason: String,
}

/// Whose turn it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Project(ProjectId),
    /// Nobody's before this; `None` = nobody has a loss.
    Wait(Option<Instant>),
}

impl Queues {
    /// One more of the same kind joins the one that waits.
    pub(super) fn add(&mut self, loss: Loss) {
        let losses = &mut self.projects.entry(loss.project).or_default().losses;
        // The first one may be on its way to the bus.
        match losses.iter_mut().skip(1).find(|known| known.covers(&loss)) {
            Some(known) => known.join(loss),
            None => losses.push_back(loss),
        }
    }

    /// Whoever has waited longest for a turn, of those whose pause is over.
    pub(super) fn turn(&mut self, now: Instant) -> Turn {
        self.forget_unwanted();
        let is_due = |queue: &Queue| queue.due.is_none_or(|due| due <= now);
        let due = self.projects.iter_mut().filter(|(_, queue)| is_due(queue));
        let Some((project, queue)) = due.min_by_key(|(_, queue)| queue.turn) else {
            return Turn::Wait(self.projects.values().filter_map(|queue| queue.due).min());
        };
        self.turns += 1;
        queue.turn = self.turns;
        Turn::Project(*project)
    }

    /// The project's first.
    pub(super) fn front(&self, project: ProjectId) -> Option<&Loss> {
        self.projects.get(&project)?.losses.front()
    }

    /// The bus has the project's first.
    pub(super) fn taken(&mut self, project: ProjectId) -> Option<Loss> {
        let queue = self.projects.get_mut(&project)?;
        (queue.pause, queue.due, queue.refused) = (Duration::ZERO, None, None);
        let loss = queue.losses.pop_front();
        self.forget_unwanted();
        loss
    }

    /// The bus has not taken the project's first, since it can't be reached or didn't answer.
    pub(super) fn failed(&mut self, project: ProjectId, is_away: bool, now: Instant) {
        let Some(queue) = self.projects.get_mut(&project) else { return };
        queue.wait(now);
        if is_away {
            // An outage that ends gives everybody a fresh start.
            queue.refused = None;
        }
    }

    /// The bus refuses the project's first; answers for how long it has.
    pub(super) fn refused(&mut self, project: ProjectId, reason: String, now: Instant) -> Duration {
        let Some(queue) = self.projects.get_mut(&project) else { return Duration::ZERO };
        queue.wait(now);
        let (lasts, last) = queue.refused.as_ref().map_or((Duration::ZERO, now), |known| (known.lasts, known.last));
        let lasts = lasts + now.saturating_duration_since(last).min(ASLEEP);
        queue.refused = Some(Refused { lasts, last: now, reason });
        lasts
    }

    /// What has been refused for longest.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let refused = self.projects.iter().filter_map(|(project, queue)| Some((project, queue.refused.as_ref()?)));
        let (project, refused) = refused.max_by_key(|(_, refused)| refused.lasts)?;
        Some(Refusal { project: *project, reason: refused.reason.clone() })
    }

    /// The rows that are out are read again: answers what was claimed by losses, which come again with them. The losses
    /// stay: one may be on its way, and others belong to no row.
    pub(super) fn abandon(&mut self) -> Vec<Admission> {
        let mut claims = Vec::new();
        for queue in self.projects.values_mut() {
            queue.refused = None;
            claims.extend(queue.losses.iter_mut().flat_map(|loss| loss.claims.drain(..)));
        }
        claims
    }

    /// See [`Loss::opens_generation`].
    pub(super) fn generation_is_open(&self) -> bool {
        !self.projects.values().flat_map(|queue| &queue.losses).any(|loss| loss.opens_generation)
    }

    /// Losses of which nobody waits to hear any more, and projects without any.
    fn forget_unwanted(&mut self) {
        self.projects.retain(|_, queue| {
            queue.losses.retain(Loss::is_wanted);
            !queue.losses.is_empty()
        });
    }
}

impl Queue {
    fn wait(&mut self, now: Instant) {
        let (first, longest) = PAUSE;
        self.pause = (self.pause * 2).clamp(first, longest);
        self.due = Some(now + self.pause);
    }
}

#[cfg(test)]
mod tests {
    use aura_wire::GapReason;
    use tokio::sync::oneshot;
    use uuid::Uuid;

    use super::*;

    const A: ProjectId = ProjectId(Uuid::from_u128(1));
    const B: ProjectId = ProjectId(Uuid::from_u128(2));
    const C: ProjectId = ProjectId(Uuid::from_u128(3));
    const LATER: Duration = Duration::from_millis(1);

    fn loss(project: ProjectId, table: &str) -> Loss {
        Loss::up_to_now(project, GapReason::Undecodable, Some(["public".to_owned(), table.to_owned()]))
    }

    fn queues(losses: &[(ProjectId, &str)]) -> Queues {
        let mut queues = Queues::default();
        losses.iter().for_each(|(project, table)| queues.add(loss(*project, table)));
        queues
    }

    fn taken(queues: &mut Queues, project: ProjectId) -> String {
        let loss = queues.taken(project).expect("it has one");
        loss.table.map(|[_, table]| table).unwrap_or_default()
    }

    fn refuse(queues: &mut Queues, now: Instant) -> Duration {
        queues.refused(A, "no".to_owned(), now)
    }

    #[test]
    fn r_sh_5_a_refused_project_delays_no_other_and_each_keeps_its_order() {
        let mut queues = queues(&[(A, "a1"), (A, "a2"), (B, "b1"), (C, "c1"), (B, "b2")]);
        let now = Instant::now();
        assert_eq!(queues.turn(now), Turn::Project(A));
        refuse(&mut queues, now);
        for (project, table) in [(B, "b1"), (C, "c1"), (B, "b2")] {
            assert_eq!(queues.turn(now), Turn::Project(project));
            assert_eq!(taken(&mut queues, project), table);
        }
        let Turn::Wait(Some(due)) = queues.turn(now) else { panic!("it pauses") };
        assert!(now < due && due <= now + PAUSE.1);
        assert_eq!(queues.turn(due), Turn::Project(A), "tried again");
        assert_eq!((taken(&mut queues, A), taken(&mut queues, A)), ("a1".to_owned(), "a2".to_owned()));
        assert_eq!(queues.turn(due), Turn::Wait(None));
    }

    #[test]
    fn r_sh_5_who_always_has_losses_leaves_others_their_turn() {
        let mut queues = queues(&[(A, "a"), (B, "b")]);
        let now = Instant::now();
        assert_eq!(queues.turn(now), Turn::Project(A));
        queues.add(loss(A, "more"));
        queues.taken(A);
        assert_eq!(queues.turn(now), Turn::Project(B));
    }

    #[test]
    fn r_sh_5_only_a_refusal_by_a_bus_that_is_there_counts_and_sleep_does_not() {
        let mut queues = queues(&[(A, "a")]);
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(refuse(&mut queues, at(0)), Duration::ZERO);
        assert_eq!(refuse(&mut queues, at(2)), Duration::from_secs(2));
        queues.failed(A, false, at(3));
        assert_eq!(refuse(&mut queues, at(4)), Duration::from_secs(4), "no answer is no outage");
        assert_eq!(refuse(&mut queues, at(1000)), Duration::from_secs(4) + ASLEEP);
        assert_eq!(queues.refusal(), Some(Refusal { project: A, reason: "no".to_owned() }));
        queues.failed(A, true, at(1001));
        assert_eq!(queues.refusal(), None);
        assert_eq!(refuse(&mut queues, at(1002)), Duration::ZERO, "a fresh start after an outage");
        refuse(&mut queues, at(1004));
        queues.add(loss(A, "next"));
        queues.taken(A);
        assert_eq!(refuse(&mut queues, at(1005)), Duration::ZERO, "another one");
    }

    #[test]
    fn g8_one_on_its_way_is_not_joined_and_one_nobody_waits_for_is_dropped() {
        let mut queues = queues(&[(A, "a"), (A, "a"), (A, "a")]);
        let now = Instant::now();
        let (told, heard) = oneshot::channel();
        queues.add(Loss { told: Some(told), ..loss(A, "a") });
        queues.taken(A);
        assert!(queues.taken(A).is_some_and(|loss| loss.told.is_none()), "one for the two");
        assert_eq!(queues.turn(now), Turn::Project(A));
        drop(heard);
        assert_eq!(queues.turn(now + LATER), Turn::Wait(None));
    }

    #[test]
    fn g8_a_generation_is_open_when_every_project_was_told() {
        let mut queues = queues(&[(A, "a")]);
        queues.add(Loss { opens_generation: true, ..Loss::up_to_now(A, GapReason::NewGeneration, None) });
        queues.add(Loss { opens_generation: true, ..Loss::up_to_now(B, GapReason::NewGeneration, None) });
        queues.taken(B);
        queues.taken(A);
        assert!(!queues.generation_is_open());
        queues.taken(A);
        assert!(queues.generation_is_open());
    }
}
