//! The leader's copy of all fronts' subscriptions of one source, indexed so that a row finds its subscribers without
//! looking at the others (R-RLS-7): table → filter column → value.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use aura_domain::{ChangeKind, EventFilter, FrontId, Image, ProjectId, SubId, SubscriptionSpec, Value};
use aura_pgsource::visibility::Identity;
use aura_wire::control::Subscription;

use super::filter::CompiledCondition;

/// A subscription whose filter was checked.
#[derive(Debug)]
pub(crate) struct ActiveSubscription {
    pub(crate) sub_id: SubId,
    pub(crate) twin: SubId,
    pub(crate) identity: Arc<Identity>,
    pub(crate) event: EventFilter,
    pub(crate) conditions: Vec<CompiledCondition>,
    pub(crate) select: Option<Vec<String>>,
}

impl ActiveSubscription {
    fn wants(&self, kind: ChangeKind) -> bool {
        match kind {
            ChangeKind::Insert => matches!(self.event, EventFilter::All | EventFilter::Insert),
            ChangeKind::Update => matches!(self.event, EventFilter::All | EventFilter::Update),
            ChangeKind::Delete => matches!(self.event, EventFilter::All | EventFilter::Delete),
            ChangeKind::Truncate => false,
        }
    }
}

/// A table in the client's words.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct TableKey {
    pub(crate) project: ProjectId,
    pub(crate) schema: String,
    pub(crate) table: String,
}

impl TableKey {
    /// The one table that a subscription names; `None` for a wildcard.
    pub(crate) fn of(spec: &SubscriptionSpec) -> Option<Self> {
        let table = spec.table.as_ref().filter(|_| spec.schema != "*")?;
        Some(Self { project: spec.project, schema: spec.schema.clone(), table: table.clone() })
    }
}

/// Subscriptions of one table: those with a filter under their first condition's column and values.
#[derive(Debug, Default)]
struct TableIndex {
    unfiltered: Vec<Arc<ActiveSubscription>>,
    /// All subscriptions under one column share its type, hence one way to make a row's value canonical.
    by_column: HashMap<String, HashMap<String, Vec<Arc<ActiveSubscription>>>>,
}

#[derive(Debug)]
struct Stored {
    subscription: Subscription,
    fronts: HashSet<FrontId>,
    /// `None`: the table isn't registered (yet).
    active: Option<Arc<ActiveSubscription>>,
}

#[derive(Debug, Default)]
struct FrontState {
    rev: u64,
    sub_ids: HashSet<SubId>,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct SubscriptionIndex {
    stored: HashMap<SubId, Stored>,
    fronts: HashMap<FrontId, FrontState>,
    tables: HashMap<TableKey, TableIndex>,
    /// Whole schemas, or `*`.
    wildcards: HashMap<ProjectId, Vec<Arc<ActiveSubscription>>>,
}

impl SubscriptionIndex {
    /// Adds a subscription of a front, or another front's claim to it. `active` of `None` keeps it dormant.
    pub(crate) fn insert(
        &mut self,
        front: &FrontId,
        subscription: Subscription,
        active: Option<Arc<ActiveSubscription>>,
    ) {
        let sub_id = subscription.sub_id;
        self.fronts.entry(front.clone()).or_default().sub_ids.insert(sub_id);
        let stored =
            self.stored.entry(sub_id).or_insert_with(|| Stored { subscription, fronts: HashSet::new(), active: None });
        stored.fronts.insert(front.clone());
        if let Some(active) = active {
            self.activate(sub_id, active);
        }
    }

    /// Makes a dormant subscription deliver.
    pub(crate) fn activate(&mut self, sub_id: SubId, active: Arc<ActiveSubscription>) {
        let Some(stored) = self.stored.get_mut(&sub_id) else { return };
        if stored.active.is_some() {
            return;
        }
        stored.active = Some(Arc::clone(&active));
        let spec = &stored.subscription.spec;
        match TableKey::of(spec) {
            Some(key) => self.tables.entry(key).or_default().insert(active),
            None => self.wildcards.entry(spec.project).or_default().push(active),
        }
    }

    /// A front no longer has these.
    pub(crate) fn remove(&mut self, front: &FrontId, sub_ids: impl IntoIterator<Item = SubId>) {
        for sub_id in sub_ids {
            if let Some(state) = self.fronts.get_mut(front) {
                state.sub_ids.remove(&sub_id);
            }
            let Some(stored) = self.stored.get_mut(&sub_id) else { continue };
            stored.fronts.remove(front);
            if stored.fronts.is_empty() {
                self.discard(sub_id);
            }
        }
    }

    /// Whatever the front had beyond `keep` is gone (the end of a snapshot).
    pub(crate) fn retain(&mut self, front: &FrontId, keep: &HashSet<SubId>) {
        let gone: Vec<_> = match self.fronts.get(front) {
            Some(state) => state.sub_ids.difference(keep).copied().collect(),
            None => return,
        };
        self.remove(front, gone);
    }

    /// The front has left.
    pub(crate) fn forget_front(&mut self, front: &FrontId) {
        self.retain(front, &HashSet::new());
        self.fronts.remove(front);
    }

    /// Revision and number of subscriptions that we have of a front.
    pub(crate) fn front_state(&self, front: &FrontId) -> Option<(u64, usize)> {
        self.fronts.get(front).map(|state| (state.rev, state.sub_ids.len()))
    }

    /// Notes the revision of a front.
    pub(crate) fn set_rev(&mut self, front: &FrontId, rev: u64) {
        self.fronts.entry(front.clone()).or_default().rev = rev;
    }

    /// All fronts with their revisions.
    pub(crate) fn revs(&self) -> Vec<(FrontId, u64)> {
        self.fronts.iter().map(|(front, state)| (front.clone(), state.rev)).collect()
    }

    /// Subscriptions that wait for their table.
    pub(crate) fn dormant(&self) -> Vec<Subscription> {
        self.stored.values().filter(|s| s.active.is_none()).map(|s| s.subscription.clone()).collect()
    }

    /// Whether the subscription delivers.
    pub(crate) fn is_active(&self, sub_id: SubId) -> bool {
        self.stored.get(&sub_id).is_some_and(|stored| stored.active.is_some())
    }

    /// Bindings whose event, table and filter fit the row; the image decides the filter: the new one of INSERT and UPDATE,
    /// the old one of DELETE.
    pub(crate) fn matching(&self, key: &TableKey, kind: ChangeKind, image: &Image) -> Vec<Arc<ActiveSubscription>> {
        let mut found = Vec::new();
        if let Some(table) = self.tables.get(key) {
            table.matching(image, &mut found);
        }
        found.retain(|sub| sub.wants(kind));
        for sub in self.wildcards.get(&key.project).into_iter().flatten() {
            let schema = &self.stored[&sub.sub_id].subscription.spec.schema;
            let table = self.stored[&sub.sub_id].subscription.spec.table.as_deref();
            let named = (schema == "*" || *schema == key.schema) && table.is_none_or(|table| table == key.table);
            if named && sub.wants(kind) && sub.conditions.iter().all(|condition| condition.matches(image)) {
                found.push(Arc::clone(sub));
            }
        }
        found
    }

    fn discard(&mut self, sub_id: SubId) {
        let Some(stored) = self.stored.remove(&sub_id) else { return };
        let spec = stored.subscription.spec;
        if let Some(subs) = self.wildcards.get_mut(&spec.project) {
            subs.retain(|sub| sub.sub_id != sub_id);
        }
        let Some(table) = spec.table else { return };
        let key = TableKey { project: spec.project, schema: spec.schema, table };
        if let Some(index) = self.tables.get_mut(&key) {
            index.remove(sub_id, stored.active.as_deref());
            if index.is_empty() {
                self.tables.remove(&key);
            }
        }
    }
}

impl TableIndex {
    fn insert(&mut self, sub: Arc<ActiveSubscription>) {
        let Some(first) = sub.conditions.first() else { return self.unfiltered.push(sub) };
        let values = self.by_column.entry(first.column.clone()).or_default();
        for value in &first.values {
            values.entry(value.clone()).or_default().push(Arc::clone(&sub));
        }
    }

    fn remove(&mut self, sub_id: SubId, active: Option<&ActiveSubscription>) {
        self.unfiltered.retain(|sub| sub.sub_id != sub_id);
        let Some(first) = active.and_then(|active| active.conditions.first()) else { return };
        let Some(values) = self.by_column.get_mut(&first.column) else { return };
        for value in &first.values {
            if let Some(subs) = values.get_mut(value) {
                subs.retain(|sub| sub.sub_id != sub_id);
            }
        }
        values.retain(|_, subs| !subs.is_empty());
        self.by_column.retain(|_, values| !values.is_empty());
    }

    fn is_empty(&self) -> bool {
        self.unfiltered.is_empty() && self.by_column.is_empty()
    }

    fn matching(&self, image: &Image, found: &mut Vec<Arc<ActiveSubscription>>) {
        found.extend(self.unfiltered.iter().cloned());
        for (column, values) in &self.by_column {
            let Some(Value::Text(text)) = image.get(column) else { continue };
            let equality = values.values().flatten().next().map(|sub| sub.conditions[0].equality);
            let Some(value) = equality.and_then(|equality| equality.canonical(text)) else { continue };
            let candidates = values.get(&value).into_iter().flatten();
            found.extend(candidates.filter(|sub| sub.conditions[1..].iter().all(|c| c.matches(image))).cloned());
        }
    }
}

#[cfg(test)]
mod tests {
    use aura_domain::{Cell, Claims, SubscriptionSpec};
    use aura_pgsource::TypeInfo;
    use serde_json::json;

    use super::*;
    use crate::subs::filter;

    fn key() -> TableKey {
        TableKey { project: ProjectId(uuid::Uuid::nil()), schema: "public".to_owned(), table: "t".to_owned() }
    }

    fn row(id: &str, room: &str) -> Image {
        let cell = |name: &str, text: &str| Cell { name: name.into(), type_oid: 0, value: Value::Text(text.into()) };
        Image(vec![cell("id", id), cell("room", room)])
    }

    fn subscription(
        id: u64,
        table: Option<&str>,
        filter_text: &str,
        event: EventFilter,
    ) -> (Subscription, Arc<ActiveSubscription>) {
        let claims = Claims::from_payload(&json!({})).expect("an object");
        let spec = SubscriptionSpec {
            project: key().project,
            schema: "public".to_owned(),
            table: table.map(str::to_owned),
            event,
            filter: Some(filter_text.to_owned()),
            select: None,
            role: "anon".to_owned(),
            claims: claims.clone(),
        };
        let conditions = filter::parse(filter_text).expect("it parses");
        let compile = |c: &filter::Condition| {
            let oid = if c.column == "id" { 23 } else { 25 };
            CompiledCondition::new(c, &TypeInfo::built_in(oid).expect("a built-in type"))
        };
        let active = ActiveSubscription {
            sub_id: SubId(id),
            twin: SubId(id + 1000),
            identity: Arc::new(Identity { role: "anon".to_owned(), claims }),
            event,
            conditions: conditions.iter().map(compile).collect::<Result<_, _>>().expect("it compiles"),
            select: None,
        };
        (Subscription { sub_id: SubId(id), twin: SubId(id + 1000), spec }, Arc::new(active))
    }

    fn ids(index: &SubscriptionIndex, kind: ChangeKind, image: &Image) -> Vec<u64> {
        let mut ids: Vec<_> = index.matching(&key(), kind, image).iter().map(|sub| sub.sub_id.0).collect();
        ids.sort_unstable();
        ids
    }

    #[test]
    fn r_rls_7_a_row_finds_its_subscribers() {
        let mut index = SubscriptionIndex::default();
        let front = FrontId("f".to_owned());
        for (id, table, filter, event) in [
            (1, Some("t"), "", EventFilter::All),
            (2, Some("t"), "id=eq.7", EventFilter::All),
            (3, Some("t"), "id=in.(7,8),room=eq.a", EventFilter::All),
            (4, Some("t"), "room=eq.b", EventFilter::All),
            (5, None, "", EventFilter::Delete),
            (6, Some("other"), "", EventFilter::All),
        ] {
            let (subscription, active) = subscription(id, table, filter, event);
            index.insert(&front, subscription, Some(active));
        }
        assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1, 2, 3]);
        assert_eq!(ids(&index, ChangeKind::Update, &row("8", "b")), [1, 4]);
        assert_eq!(ids(&index, ChangeKind::Delete, &row("9", "c")), [1, 5]);
        assert_eq!(ids(&index, ChangeKind::Truncate, &row("9", "c")), [0_u64; 0]);
    }

    #[test]
    fn a_subscription_lives_as_long_as_some_front_has_it() {
        let mut index = SubscriptionIndex::default();
        let (a, b) = (FrontId("a".to_owned()), FrontId("b".to_owned()));
        for front in [&a, &b] {
            let (subscription, active) = subscription(1, Some("t"), "id=eq.7", EventFilter::All);
            index.insert(front, subscription, Some(active));
        }
        index.remove(&a, [SubId(1)]);
        assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1]);
        index.forget_front(&b);
        assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [0_u64; 0]);
        assert!(index.tables.is_empty() && index.stored.is_empty(), "nothing is left behind");
    }

    #[test]
    fn a_dormant_subscription_wakes_when_its_table_is_registered() {
        let mut index = SubscriptionIndex::default();
        let front = FrontId("a".to_owned());
        let (subscription, active) = subscription(1, Some("t"), "", EventFilter::All);
        index.insert(&front, subscription.clone(), None);
        assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [0_u64; 0]);
        assert_eq!(index.dormant(), [subscription]);
        index.activate(SubId(1), active);
        assert_eq!(ids(&index, ChangeKind::Insert, &row("7", "a")), [1]);
        assert!(index.dormant().is_empty());
    }
}
