//! What holds of an engine besides its state, and since when.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use aura_domain::{Condition, ConditionNote};

use crate::status::now;

/// One run's conditions. Clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Conditions(Arc<Mutex<BTreeMap<Condition, Note>>>);

#[derive(Debug)]
struct Note {
    since: String,
    detail: Option<String>,
}

impl Conditions {
    /// It holds; the detail may be news, the beginning isn't.
    pub(crate) fn set(&self, condition: Condition, detail: Option<String>) {
        let mut notes = self.lock();
        match notes.get_mut(&condition) {
            Some(note) => note.detail = detail,
            None => drop(notes.insert(condition, Note { since: now(), detail })),
        }
    }

    /// It doesn't hold.
    pub(crate) fn clear(&self, condition: Condition) {
        self.lock().remove(&condition);
    }

    /// It holds if there is a detail.
    pub(crate) fn put(&self, condition: Condition, holds: bool, detail: Option<String>) {
        if holds { self.set(condition, detail) } else { self.clear(condition) }
    }

    /// All that hold.
    pub(crate) fn read(&self) -> Vec<ConditionNote> {
        let note = |(condition, note): (&Condition, &Note)| ConditionNote {
            condition: *condition,
            since: note.since.clone(),
            detail: note.detail.clone(),
        };
        self.lock().iter().map(note).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Condition, Note>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_keeps_its_beginning_until_it_ends() {
        let conditions = Conditions::default();
        conditions.set(Condition::Lagging, Some("a".to_owned()));
        let first = conditions.read();
        conditions.put(Condition::Lagging, true, Some("b".to_owned()));
        let again = conditions.read();
        assert_eq!((again.len(), &again[0].since), (1, &first[0].since));
        assert_eq!(again[0].detail.as_deref(), Some("b"));
        conditions.put(Condition::Lagging, false, None);
        assert_eq!(conditions.read(), []);
    }
}
