use proptest::prelude::*;

use super::*;

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn names(plan: &DrainPlanner) -> Vec<&'static str> {
    plan.times().phases.iter().map(|(name, _)| *name).collect()
}

/// The table of F.9, for a work that never ends.
#[test]
fn r_sd_the_default_budget_is_the_table() {
    let start = Instant::now();
    let mut plan = DrainPlanner::new(Budget::shutdown(Duration::from_secs(25)), start);
    for (phase, end) in [
        (Phase::IntakeStop, 50),
        (Phase::Seal, 300),
        (Phase::Drain, 22_000),
        (Phase::Abandon, 22_500),
        (Phase::FinalPosition, 24_000),
        (Phase::Leave, 25_000),
    ] {
        assert_eq!((plan.phase(), plan.ends()), (phase, start + ms(end)));
        assert_eq!(plan.on(DrainEvent::Tick, start + ms(end - 1)), phase, "not a moment too soon");
        plan.on(DrainEvent::Tick, start + ms(end));
    }
    assert_eq!(plan.phase(), Phase::Done);
    assert!(!plan.drained() && !plan.times().overrun);
    assert_eq!(names(&plan), ["intake_stop", "seal", "drain", "abandon", "final_position", "leave"]);
}

#[test]
fn r_sd_3_what_is_done_early_goes_on_at_once() {
    let start = Instant::now();
    let mut plan = DrainPlanner::new(Budget::shutdown(Duration::from_secs(25)), start);
    for _ in 0..3 {
        plan.on(DrainEvent::Finished, start + ms(5));
    }
    assert_eq!(plan.phase(), Phase::FinalPosition, "nothing is left to abandon");
    assert!(plan.drained());
    assert_eq!(plan.ends(), start + ms(1505), "its own cap, not the 24th second");
    assert_eq!(plan.on(DrainEvent::Finished, start + ms(9)), Phase::Leave);
    assert_eq!(plan.on(DrainEvent::Finished, start + ms(12)), Phase::Done);
    assert_eq!(plan.times().phases.iter().map(|(_, took)| *took).sum::<Duration>(), ms(12));
}

#[test]
fn r_eng_3_a_stop_keeps_its_reserve_and_a_deadline_of_zero_skips_the_drain() {
    let start = Instant::now();
    for (deadline, drain_end) in [(3_000, 2_400), (10_000, 8_000), (25_000, 23_000), (300_000, 298_000)] {
        let mut plan = DrainPlanner::new(Budget::stop(ms(deadline)), start);
        plan.on(DrainEvent::Tick, start + ms(300));
        assert_eq!((plan.phase(), plan.ends()), (Phase::Drain, start + ms(drain_end)));
        assert_eq!(plan.deadline(), start + ms(deadline));
    }
    let plan = DrainPlanner::new(Budget::stop(Duration::ZERO), start);
    assert_eq!(plan.phase(), Phase::Abandon, "rows that are out are aborted");
    assert_eq!(plan.deadline(), start + AT_ONCE);
}

#[test]
fn r_sd_4_a_second_signal_leaves_one_second_for_the_position() {
    let start = Instant::now();
    let mut plan = DrainPlanner::new(Budget::shutdown(Duration::from_secs(25)), start);
    plan.on(DrainEvent::Tick, start + ms(4000));
    assert_eq!(plan.on(DrainEvent::Hurry, start + ms(5000)), Phase::FinalPosition);
    assert_eq!(plan.deadline(), start + ms(6000));
    assert!(plan.ends() < plan.deadline());
    assert_eq!(plan.on(DrainEvent::Tick, start + ms(6000)), Phase::Done);
}

#[test]
fn r_sd_4_a_second_signal_does_not_blame_the_phase_it_meets() {
    let start = Instant::now();
    let mut plan = DrainPlanner::new(Budget::shutdown(Duration::from_secs(25)), start);
    for _ in 0..4 {
        plan.on(DrainEvent::Finished, start);
    }
    assert_eq!(plan.on(DrainEvent::Hurry, start + ms(700)), Phase::Leave);
    assert_eq!(plan.ends(), start + ms(1000), "its own cap, or a second from now");
    assert_eq!(plan.on(DrainEvent::Finished, start + ms(800)), Phase::Done);
    assert!(!plan.times().overrun);
}

#[test]
fn r_eng_3_a_second_stop_can_only_shorten() {
    let start = Instant::now();
    let mut plan = DrainPlanner::new(Budget::stop(ms(10_000)), start);
    plan.on(DrainEvent::Tick, start + ms(1000));
    plan.on(DrainEvent::Tighten(Budget::stop(ms(60_000))), start + ms(1000));
    assert_eq!(plan.deadline(), start + ms(10_000));
    plan.on(DrainEvent::Tighten(Budget::stop(ms(1000))), start + ms(1000));
    assert_eq!((plan.deadline(), plan.ends()), (start + ms(2000), start + ms(1800)));
    assert_eq!(plan.on(DrainEvent::Tighten(Budget::stop(Duration::ZERO)), start + ms(1500)), Phase::Abandon);
    assert_eq!(plan.deadline(), start + ms(2000));
}

#[test]
fn a_phase_that_ignores_its_limit_is_an_overrun() {
    let start = Instant::now();
    let mut plan = DrainPlanner::new(Budget::shutdown(Duration::from_secs(5)), start);
    assert_eq!(plan.on(DrainEvent::Tick, start + Duration::from_secs(9)), Phase::Done);
    assert!(plan.times().overrun);
}

fn event() -> impl Strategy<Value = DrainEvent> {
    prop_oneof![
        3 => Just(DrainEvent::Finished),
        8 => Just(DrainEvent::Tick),
        1 => (0u64..5000).prop_map(|total| DrainEvent::Tighten(Budget::stop(ms(total)))),
        1 => (0u64..5000).prop_map(|total| DrainEvent::Tighten(Budget::shutdown(ms(total)))),
        1 => Just(DrainEvent::Hurry),
    ]
}

fn budget() -> impl Strategy<Value = Budget> {
    (0u64..30_000, any::<bool>()).prop_map(|(total, stop)| match stop {
        true => Budget::stop(ms(total)),
        false => Budget::shutdown(ms(total)),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    /// Invariant 14, the planner's share: whatever happens the phases go forward only, the deadline never moves back, all
    /// is over at the deadline, and the times add up to the whole.
    #[test]
    fn invariant_14_every_drain_ends_by_its_deadline(
        budget in budget(),
        events in prop::collection::vec((event(), 0u64..1500), 0..60),
    ) {
        let start = Instant::now();
        let mut plan = DrainPlanner::new(budget, start);
        let mut now = start;
        let (mut phase, mut deadline) = (plan.phase(), plan.deadline());
        prop_assert!(deadline <= start + budget.total.max(AT_ONCE));
        for (event, wait) in events {
            now += ms(wait);
            let next = plan.on(event, now);
            prop_assert!(next >= phase && plan.deadline() <= deadline);
            prop_assert!(next == Phase::Done || now < plan.ends());
            prop_assert!(next == Phase::Done || plan.ends() <= plan.deadline());
            if matches!(event, DrainEvent::Hurry) {
                prop_assert!(next >= Phase::FinalPosition && (next == Phase::Done || plan.deadline() <= now + HURRIED));
            }
            (phase, deadline) = (next, plan.deadline());
        }
        prop_assert_eq!(plan.on(DrainEvent::Tick, now.max(deadline)), Phase::Done);
        let sum: Duration = plan.times().phases.iter().map(|(_, took)| *took).sum();
        prop_assert!(start + sum <= now.max(deadline));
    }

    /// The reserve is kept whatever the deadline is, and each of its phases gets a share of it.
    #[test]
    fn r_eng_3_the_reserve_is_the_smaller_of_two_seconds_and_a_fifth(total in 1u64..300_000) {
        let start = Instant::now();
        let mut plan = DrainPlanner::new(Budget::stop(ms(total)), start);
        let mut ends = Vec::new();
        while plan.phase() != Phase::Done {
            ends.push((plan.phase(), plan.ends()));
            plan.on(DrainEvent::Tick, plan.ends());
        }
        let drain = ends.iter().find(|(phase, _)| *phase == Phase::Drain).map(|(_, end)| *end);
        let reserve = ms(2000).min(ms(total) / 5);
        let expected = start + ms(total) - reserve;
        prop_assert_eq!(drain.unwrap_or(expected), expected);
        prop_assert_eq!(ends.last().expect("phases").1, start + ms(total));
        prop_assert!(ends.is_sorted_by_key(|(_, end)| *end));
    }
}
