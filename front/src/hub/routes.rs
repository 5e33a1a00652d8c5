use std::{
    collections::{HashMap, hash_map},
    sync::Arc,
};

use aura_bus::Message;
use aura_domain::{Position, SubId};
use aura_wire::{GapEnvelope, IncomingChange};

use super::sequence::Sequence;
use crate::{
    outbox::Frame,
    sink::{ChannelSink, Format, encode_change},
};

/// A binding as the hub routes to it.
#[derive(Debug, Clone)]
pub(crate) struct Route {
    pub(crate) sink: Arc<ChannelSink>,
    /// The client's number for it, unique in the channel.
    pub(crate) id: u32,
    pub(crate) sub_id: SubId,
    pub(crate) twin: SubId,
    /// The client's schema word, `*` = all.
    pub(crate) schema: String,
    /// `None` = all tables.
    pub(crate) table: Option<String>,
}

#[derive(Debug)]
struct Binding {
    route: Route,
    delivered: Delivered,
}

/// Last position delivered, per table (R-FRT-5).
#[derive(Debug)]
enum Delivered {
    One(Option<Position>),
    PerTable(HashMap<(String, String), Position>),
}

impl Delivered {
    /// Whether the position is above the last one of its table; if so it becomes the last.
    fn advance(&mut self, change: &IncomingChange<'_>) -> bool {
        let position = change.position;
        match self {
            Self::One(last) if last.is_some_and(|last| position <= last) => false,
            Self::One(last) => {
                *last = Some(position);
                true
            }
            Self::PerTable(tables) => match tables.entry((change.schema.to_string(), change.table.to_string())) {
                hash_map::Entry::Occupied(mut entry) if position > *entry.get() => {
                    entry.insert(position);
                    true
                }
                hash_map::Entry::Occupied(_) => false,
                hash_map::Entry::Vacant(entry) => {
                    entry.insert(position);
                    true
                }
            },
        }
    }
}

/// Key of a binding in [`Routes`], never used twice.
pub(crate) type BindingKey = u64;

/// All bindings and members of one project on this front.
#[derive(Debug, Default)]
pub(crate) struct Routes {
    bindings: HashMap<BindingKey, Binding>,
    by_sub_id: HashMap<SubId, Vec<BindingKey>>,
    members: HashMap<Topic, Vec<Arc<ChannelSink>>>,
    next_key: BindingKey,
    pub(crate) sequence: Sequence<Message>,
}

/// A broadcast topic: public and private channels of one name are separate (supabase-wire.md §4.1).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Topic {
    pub(crate) private: bool,
    /// Without `realtime:`.
    pub(crate) name: Arc<str>,
}

impl Routes {
    /// Adds a binding.
    pub(crate) fn add(&mut self, route: Route) -> BindingKey {
        let key = self.next_key;
        self.next_key += 1;
        for sub_id in [route.sub_id, route.twin] {
            self.by_sub_id.entry(sub_id).or_default().push(key);
        }
        let single = route.table.is_some() && route.schema != "*";
        let delivered = if single { Delivered::One(None) } else { Delivered::PerTable(HashMap::new()) };
        self.bindings.insert(key, Binding { route, delivered });
        key
    }

    /// Removes a binding.
    pub(crate) fn remove(&mut self, key: BindingKey) {
        let Some(binding) = self.bindings.remove(&key) else { return };
        for sub_id in [binding.route.sub_id, binding.route.twin] {
            if let Some(keys) = self.by_sub_id.get_mut(&sub_id) {
                keys.retain(|other| *other != key);
                if keys.is_empty() {
                    self.by_sub_id.remove(&sub_id);
                }
            }
        }
    }

    /// Whether there is any binding.
    pub(crate) fn has_bindings(&self) -> bool {
        !self.bindings.is_empty()
    }

    /// Adds a member of a topic.
    pub(crate) fn join(&mut self, topic: Topic, sink: Arc<ChannelSink>) {
        self.members.entry(topic).or_default().push(sink);
    }

    /// Removes a member.
    pub(crate) fn leave(&mut self, topic: &Topic, number: u64) {
        if let Some(members) = self.members.get_mut(topic) {
            members.retain(|sink| sink.number != number);
            if members.is_empty() {
                self.members.remove(topic);
            }
        }
    }

    /// Members of a topic.
    pub(crate) fn members(&self, topic: &Topic) -> &[Arc<ChannelSink>] {
        self.members.get(topic).map_or(&[], Vec::as_slice)
    }

    /// Delivers a change: one message per channel, with the ids of all its bindings that may see it. Returns the number
    /// of messages.
    pub(crate) fn deliver(&mut self, change: &IncomingChange<'_>) -> usize {
        let mut keys: Vec<BindingKey> = change
            .allowed_sub_ids
            .iter()
            .filter_map(|sub_id| self.by_sub_id.get(sub_id))
            .flat_map(|keys| keys.iter().copied())
            .collect();
        keys.sort_unstable();
        // A worker that lists a binding under both its ids still means one delivery.
        keys.dedup();
        let mut hits: Vec<(u64, u32, BindingKey)> = Vec::with_capacity(keys.len());
        for key in keys {
            if let Some(binding) = self.bindings.get_mut(&key)
                && binding.delivered.advance(change)
            {
                hits.push((binding.route.sink.number, binding.route.id, key));
            }
        }
        hits.sort_unstable();
        self.send(&hits, change)
    }

    fn send(&self, hits: &[(u64, u32, BindingKey)], change: &IncomingChange<'_>) -> usize {
        let mut encoded: HashMap<(Format, Arc<str>, Vec<u32>), Frame> = HashMap::new();
        let mut messages = 0;
        for channel in hits.chunk_by(|a, b| a.0 == b.0) {
            let sink = &self.bindings[&channel[0].2].route.sink;
            let ids: Vec<u32> = channel.iter().map(|hit| hit.1).collect();
            let frame = match encoded.entry((sink.format, Arc::clone(&sink.topic), ids)) {
                hash_map::Entry::Occupied(entry) => entry.get().clone(),
                hash_map::Entry::Vacant(entry) => {
                    let ids = &entry.key().2;
                    let frame = encode_change(sink.format, &sink.topic, ids, change.position, change.data.get());
                    entry.insert(frame).clone()
                }
            };
            sink.send(frame);
            messages += 1;
        }
        messages
    }

    /// Channels with a binding that a gap concerns, each once.
    pub(crate) fn concerned(&self, gap: &GapEnvelope) -> Vec<Arc<ChannelSink>> {
        let mut sinks: Vec<_> = self
            .bindings
            .values()
            .filter(|binding| binding.route.concerned(gap))
            .map(|binding| Arc::clone(&binding.route.sink))
            .collect();
        sinks.sort_unstable_by_key(|sink| sink.number);
        sinks.dedup_by_key(|sink| sink.number);
        sinks
    }
}

impl Route {
    fn concerned(&self, gap: &GapEnvelope) -> bool {
        let named = gap.sub_ids.as_ref().is_none_or(|ids| ids.contains(&self.sub_id) || ids.contains(&self.twin));
        let table = gap.tables.as_ref().is_none_or(|tables| {
            tables.iter().any(|[schema, table]| {
                (self.schema == "*" || self.schema == *schema) && self.table.as_ref().is_none_or(|t| t == table)
            })
        });
        named && table
    }
}
