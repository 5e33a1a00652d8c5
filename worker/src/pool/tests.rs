use proptest::prelude::*;
use uuid::Uuid;

use super::*;

fn source(n: u8) -> SourceId {
    SourceId(Uuid::from_u128(u128::from(n)))
}

fn worker(n: u8) -> WorkerId {
    WorkerId(format!("worker-{n}"))
}

#[derive(Debug, Clone)]
enum Event {
    Joins { max: usize },
    Dies(prop::sample::Index),
    Appears,
    Stops(prop::sample::Index),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        3 => (1usize..12).prop_map(|max| Event::Joins { max }),
        2 => any::<prop::sample::Index>().prop_map(Event::Dies),
        4 => Just(Event::Appears),
        1 => any::<prop::sample::Index>().prop_map(Event::Stops),
    ]
}

/// A pool as the platform database shows it. One round: every worker plans on the same view, leases let one win.
#[derive(Debug, Default)]
struct World {
    members: Vec<Member>,
    sources: Vec<(SourceId, Option<WorkerId>)>,
    next: u8,
    /// Sources that changed hands although their holder was alive.
    moves: usize,
}

impl World {
    fn happens(&mut self, event: Event) {
        self.next += 1;
        match event {
            Event::Joins { max } => self.members.push(Member { id: worker(self.next), max_engines: max }),
            Event::Dies(which) if !self.members.is_empty() => {
                let dead = self.members.remove(which.index(self.members.len())).id;
                for (_, holder) in self.sources.iter_mut().filter(|(_, holder)| holder.as_ref() == Some(&dead)) {
                    *holder = None;
                }
            }
            Event::Appears => self.sources.push((source(self.next), None)),
            Event::Stops(which) if !self.sources.is_empty() => {
                self.sources.remove(which.index(self.sources.len()));
            }
            _ => {}
        }
    }

    fn view(&self, orphan_for: Duration) -> Vec<Wanted> {
        let holder = |holder: &Option<WorkerId>| holder.clone().map_or(Holder::None(orphan_for), Holder::Live);
        self.sources.iter().map(|(source, held)| Wanted { source: *source, holder: holder(held) }).collect()
    }

    fn plans(&self, orphan_for: Duration, settled: bool) -> Vec<(WorkerId, Plan)> {
        let view = self.view(orphan_for);
        self.members.iter().map(|m| (m.id.clone(), plan(&m.id, &self.members, &view, settled))).collect()
    }

    fn round(&mut self, orphan_for: Duration, settled: bool) {
        for (me, plan) in self.plans(orphan_for, settled) {
            for (source, holder) in &mut self.sources {
                if plan.seek.contains(source) && holder.is_none() {
                    *holder = Some(me.clone());
                }
                if plan.give_up == Some(*source) {
                    assert_eq!(holder.as_ref(), Some(&me), "only what is held can be given up");
                    *holder = None;
                    self.moves += 1;
                }
            }
        }
    }

    fn load(&self, member: &Member) -> usize {
        self.sources.iter().filter(|(_, holder)| holder.as_ref() == Some(&member.id)).count()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Whatever happened, one round after the other leads to an even share, and to no more moves than that takes.
    #[test]
    fn r_lease_3_shares_end_even_and_within_limits(events in prop::collection::vec(event(), 1..40)) {
        let mut world = World::default();
        for event in events {
            world.happens(event);
            // While things change: orphans are taken at once, nothing is given up.
            world.round(Duration::ZERO, false);
            prop_assert_eq!(world.moves, 0);
            for member in &world.members {
                prop_assert!(world.load(member) <= member.max_engines);
            }
        }
        let room: usize = world.members.iter().map(|member| member.max_engines).sum();
        // Each move takes two rounds.
        for _ in 0..2 * world.sources.len() + 2 {
            world.round(Duration::ZERO, true);
        }
        let placed = world.sources.iter().filter(|(_, holder)| holder.is_some()).count();
        prop_assert_eq!(placed, world.sources.len().min(room));
        prop_assert!(world.moves <= world.sources.len(), "{} moves", world.moves);
        for (a, b) in world.members.iter().flat_map(|a| world.members.iter().map(move |b| (a, b))) {
            let full = world.load(b) == b.max_engines;
            prop_assert!(full || world.load(a) <= world.load(b) + 1, "{world:?}");
        }
        // And it stays so.
        let moves = world.moves;
        world.round(Duration::ZERO, true);
        prop_assert_eq!(world.moves, moves);
    }

    /// Every orphan has exactly one who goes for it at once, and at last somebody does who can.
    #[test]
    fn r_lease_3_an_orphan_has_one_favourite(members in 1u8..6, sources in 1u8..12, held in 0u8..12) {
        let mut world = World::default();
        world.members.extend((0..members).map(|n| Member { id: worker(n), max_engines: 100 }));
        world.sources.extend((0..sources).map(|n| (source(n), (n < held).then(|| worker(n % members)))));
        let orphans = world.sources.iter().filter(|(_, holder)| holder.is_none()).count();
        let sought: usize = world.plans(Duration::ZERO, true).iter().map(|(_, plan)| plan.seek.len()).sum();
        prop_assert_eq!(sought, orphans);
        for (_, plan) in world.plans(PATIENCE * u32::from(members), true) {
            prop_assert_eq!(plan.seek.len(), orphans, "the favourite may be dead without anybody knowing");
        }
    }
}

#[test]
fn r_lease_3_nothing_is_given_up_before_the_pool_has_settled() {
    let members: Vec<_> = (0..2).map(|n| Member { id: worker(n), max_engines: 8 }).collect();
    let wanted: Vec<_> = (0..4).map(|n| Wanted { source: source(n), holder: Holder::Live(worker(0)) }).collect();
    let early = plan(&worker(0), &members, &wanted, false);
    assert_eq!(early, Plan::default());
    assert!(plan(&worker(0), &members, &wanted, true).give_up.is_some());
    assert_eq!(plan(&worker(1), &members, &wanted, true), Plan::default(), "the other only waits");
    // One at a time: not while another one is on its way.
    let mut moving = wanted;
    moving[0].holder = Holder::None(Duration::ZERO);
    assert_eq!(plan(&worker(0), &members, &moving, true).give_up, None);
    assert_eq!(plan(&worker(1), &members, &moving, true).seek, [source(0)], "the less loaded one takes it");
}

#[test]
fn r_lease_3_a_source_of_a_worker_that_leaves_is_its_own_until_it_has_left() {
    let members = [Member { id: worker(1), max_engines: 8 }];
    let wanted = [Wanted { source: source(0), holder: Holder::Live(worker(0)) }];
    assert_eq!(plan(&worker(1), &members, &wanted, true), Plan::default());
}
