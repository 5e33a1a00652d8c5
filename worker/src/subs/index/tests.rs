use aura_domain::{Cell, Claims, Value};
use aura_pgsource::{Column, TypeInfo, conditions};
use serde_json::json;

use super::*;

fn key() -> TableKey {
    TableKey { project: ProjectId(uuid::Uuid::nil()), schema: "public".to_owned(), table: "t".to_owned() }
}

fn row(id: &str, room: &str) -> Image {
    let cell = |name: &str, text: &str| Cell { name: name.into(), type_oid: 0, value: Value::Text(text.into()) };
    Image(vec![cell("id", id), cell("room", room)])
}

fn column(name: &str) -> Column {
    let (oid, collation) = if name == "id" { (23, 0) } else { (25, 100) };
    let ty = TypeInfo::built_in(oid).expect("a built-in type");
    Column { name: name.into(), attnum: 1, ty, primary_key: false, collation }
}

fn subscription(
    id: u64,
    (schema, table): (&str, Option<&str>),
    filter: &str,
    event: EventFilter,
) -> (Subscription, ActiveSubscription) {
    let claims = Claims::from_payload(&json!({})).expect("an object");
    let spec = SubscriptionSpec {
        project: key().project,
        schema: schema.to_owned(),
        table: table.map(str::to_owned),
        event,
        filter: Some(filter.to_owned()),
        select: None,
        role: "anon".to_owned(),
        claims: claims.clone(),
    };
    let compile = |condition: &conditions::Condition| {
        Arc::new(Compiled::plain(condition, &column(&condition.column)).expect("a plain one"))
    };
    let active = ActiveSubscription {
        sub_id: SubId(id),
        twin: SubId(id + 1000),
        identity: Arc::new(Identity { role: "anon".to_owned(), claims }),
        event,
        conditions: conditions::parse(filter).expect("it parses").iter().map(compile).collect(),
        select: None,
    };
    (Subscription { sub_id: SubId(id), twin: SubId(id + 1000), spec }, active)
}

/// A front `f` joins.
fn join(index: &mut SubscriptionIndex, id: u64, named: (&str, Option<&str>), filter: &str, event: EventFilter) {
    let (subscription, active) = subscription(id, named, filter, event);
    let active = match TableKey::of(&subscription.spec) {
        Some(key) => Active::Table(key, active),
        None if filter.is_empty() => Active::Wildcard(active),
        None => Active::Filtered(vec![(key(), active)]),
    };
    index.insert(&FrontId("f".to_owned()), subscription, Some(active));
}

fn ids(index: &SubscriptionIndex, kind: ChangeKind, image: &Image) -> Vec<u64> {
    let matched = index.matching(&key(), kind, image, &mut Answers::default());
    let mut ids: Vec<_> = matched.found.iter().map(|sub| sub.sub_id.0).collect();
    ids.sort_unstable();
    ids
}

const T: (&str, Option<&str>) = ("public", Some("t"));
const NOBODY: [u64; 0] = [];

#[test]
fn r_rls_7_a_row_finds_its_subscribers() {
    let mut index = SubscriptionIndex::default();
    for (id, named, filter, event) in [
        (1, T, "", EventFilter::All),
        (2, T, "id=eq.7", EventFilter::All),
        (3, T, "id=in.(7,8,7),room=eq.a", EventFilter::All),
        (4, T, "room=eq.b", EventFilter::All),
        (5, ("public", None), "", EventFilter::Delete),
        (6, ("public", Some("other")), "", EventFilter::All),
        (7, T, "id=gt.7", EventFilter::All),
        (8, T, "id=gt.7,room=neq.c", EventFilter::Insert),
        (9, T, "room=not.in.(a,b)", EventFilter::All),
        (10, ("*", None), "id=lt.9", EventFilter::All),
        (11, ("*", Some("t")), "", EventFilter::Insert),
        (12, ("*", Some("other")), "", EventFilter::All),
        (13, ("other", None), "", EventFilter::All),
    ] {
        join(&mut index, id, named, filter, event);
    }
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1, 2, 3, 10, 11]);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("8", "b")), [1, 4, 7, 8, 10, 11]);
    assert_eq!(ids(&index, ChangeKind::Update, &row("8", "b")), [1, 4, 7, 10]);
    assert_eq!(ids(&index, ChangeKind::Delete, &row("9", "c")), [1, 5, 7, 9]);
    assert_eq!(ids(&index, ChangeKind::Truncate, &row("9", "c")), NOBODY);
    index.forget_front(&FrontId("f".to_owned()));
    let empty =
        index.tables.is_empty() && index.stored.is_empty() && index.wildcards.is_empty() && index.filtered.is_empty();
    assert!(empty, "nothing is left behind");
}

/// Cost follows the matching subscribers: ten thousand others are neither looked at nor left behind one by one.
#[test]
fn r_rls_7_subscribers_of_other_values_are_not_evaluated() {
    let mut index = SubscriptionIndex::default();
    for id in 0..10_000 {
        join(&mut index, id, T, &format!("room=neq.x,id=eq.{id}"), EventFilter::All);
        join(&mut index, 10_000 + id, T, "id=gte.5000", EventFilter::All);
    }
    let table = &index.tables[&key()];
    assert_eq!((table.groups(), table.distinct_conditions()), ((1, 1), 10_002));
    assert_eq!(ids(&index, ChangeKind::Insert, &row("77", "a")), [77], "found by the eq, though it isn't the first");
    index.remove(&FrontId("f".to_owned()), (0..20_000).filter(|id| *id != 77).map(SubId));
    assert_eq!((index.tables[&key()].groups(), index.tables[&key()].distinct_conditions()), ((1, 0), 2));
    assert_eq!(ids(&index, ChangeKind::Insert, &row("77", "a")), [77]);
}

#[test]
fn a_value_of_another_type_fails_whose_filter_asks_for_it_and_nobody_else() {
    let mut index = SubscriptionIndex::default();
    join(&mut index, 1, T, "id=eq.7", EventFilter::All);
    join(&mut index, 2, T, "id=eq.8,room=eq.b", EventFilter::All);
    join(&mut index, 3, T, "id=gt.1", EventFilter::All);
    join(&mut index, 4, T, "room=eq.a", EventFilter::All);
    let mut image = row("7", "a");
    image.0[0].type_oid = 25;
    let matched = index.matching(&key(), ChangeKind::Insert, &image, &mut Answers::default());
    assert_eq!(matched.found.iter().map(|sub| sub.sub_id.0).collect::<Vec<_>>(), [4]);
    let mut failed: Vec<_> = matched.failed.iter().map(|sub| sub.sub_id).collect();
    failed.sort_unstable();
    assert_eq!(failed, [SubId(1), SubId(3)], "the second's other condition excludes the row");
}

#[test]
fn a_subscription_lives_as_long_as_some_front_has_it() {
    let mut index = SubscriptionIndex::default();
    let (a, b) = (FrontId("a".to_owned()), FrontId("b".to_owned()));
    for front in [&a, &b] {
        let (subscription, active) = subscription(1, T, "id=eq.7", EventFilter::All);
        index.insert(front, subscription, Some(Active::Table(key(), active)));
    }
    index.remove(&a, [SubId(1)]);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1]);
    index.forget_front(&b);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), NOBODY);
    assert!(index.tables.is_empty() && index.stored.is_empty(), "nothing is left behind");
}

#[test]
fn a_dormant_subscription_wakes_when_its_table_is_registered() {
    let mut index = SubscriptionIndex::default();
    let front = FrontId("a".to_owned());
    let (subscription, active) = subscription(1, T, "", EventFilter::All);
    index.insert(&front, subscription.clone(), None);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), NOBODY);
    assert_eq!(index.dormant(), [subscription]);
    index.activate(SubId(1), Active::Table(key(), active));
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1]);
    assert!(index.dormant().is_empty());
}

#[test]
fn a_wildcard_s_filter_is_compiled_for_each_table_and_compiled_again_in_place() {
    let mut index = SubscriptionIndex::default();
    let (wild, active) = subscription(1, ("public", None), "id=eq.7", EventFilter::All);
    index.insert(&FrontId("f".to_owned()), wild.clone(), Some(Active::Filtered(Vec::new())));
    assert_eq!(index.uncompiled(&key()), [wild]);
    let elsewhere = TableKey { schema: "other".to_owned(), ..key() };
    assert_eq!(index.uncompiled(&elsewhere), []);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), NOBODY, "never without its filter");
    index.put(&key(), active);
    assert_eq!(index.uncompiled(&key()), []);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1]);
    let (_, again) = subscription(1, ("public", None), "id=eq.8", EventFilter::All);
    index.put(&key(), again);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), NOBODY);
    assert_eq!(ids(&index, ChangeKind::Insert, &row("8", "a")), [1]);
    index.deactivate(SubId(1));
    assert!(index.tables.is_empty() && index.filtered.is_empty() && !index.is_active(SubId(1)));
}

#[test]
fn the_three_named_tables_of_a_wildcard() {
    let named = |schema: &str, table: Option<&str>| {
        key().is_named_by(&subscription(1, (schema, table), "", EventFilter::All).0.spec)
    };
    assert!(named("*", None) && named("public", None) && named("*", Some("t")) && named("public", Some("t")));
    assert!(!named("other", None) && !named("*", Some("x")) && !named("public", Some("x")));
}
