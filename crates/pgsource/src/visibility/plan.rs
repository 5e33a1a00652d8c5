//! What each identity must be asked, decided from the catalogue alone where that is enough.

use std::{collections::HashMap, sync::Arc, time::Instant};

use super::{CheckRequest, Identity, IdentityErrorKind, Verdict, circuit::Circuits, statement};
use crate::{
    catalog::{RoleAccess, TableCatalog},
    roles::{SERVICE_ROLE, allowed_role},
};

/// The plan of one check against one catalogue state.
pub(super) struct Plan<'a> {
    /// One per identity of the request.
    pub(super) entries: Vec<Entry<'a>>,
    questions: Vec<Question>,
    images: usize,
}

/// One identity.
pub(super) enum Entry<'a> {
    /// Nothing to ask.
    Fixed(Verdict),
    /// To be asked in the database.
    Ask(Asked<'a>),
}

/// An identity to be asked.
pub(super) struct Asked<'a> {
    pub(super) identity: &'a Identity,
    /// The claim of that name, empty if it isn't a text.
    pub(super) sub: String,
    question: usize,
}

/// What all identities of one role are asked.
pub(super) struct Question {
    /// Database role.
    pub(super) role: String,
    /// The statement.
    pub(super) sql: String,
    /// The images that can be judged, as text of the row type.
    pub(super) rows: Vec<String>,
    /// Their indexes in the request.
    indexes: Vec<usize>,
    access: Arc<RoleAccess>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(request: &CheckRequest<'a>, table: &TableCatalog, circuits: &Circuits) -> Self {
        let mut plan = Self { entries: Vec::new(), questions: Vec::new(), images: request.images.len() };
        let mut by_word: HashMap<&str, RolePlan> = HashMap::new();
        for identity in request.identities {
            let role = by_word.entry(&identity.role).or_insert_with(|| plan.role(request, table, &identity.role));
            let entry = match role {
                RolePlan::Fixed(verdict) => Entry::Fixed(verdict.clone()),
                RolePlan::Ask(_) if circuits.is_open(request.relation, identity, Instant::now()) => {
                    Entry::Fixed(Verdict::Error(IdentityErrorKind::CircuitOpen))
                }
                RolePlan::Ask(question) => Entry::Ask(Asked { identity, sub: subject(identity), question: *question }),
            };
            plan.entries.push(entry);
        }
        plan
    }

    /// Indexes of the identities that must be asked.
    pub(super) fn to_ask(&self) -> Vec<usize> {
        let ask = |(n, entry): (usize, &Entry<'_>)| matches!(entry, Entry::Ask(_)).then_some(n);
        self.entries.iter().enumerate().filter_map(ask).collect()
    }

    pub(super) fn asked(&self, at: usize) -> Option<(&Asked<'a>, &Question)> {
        match self.entries.get(at)? {
            Entry::Ask(asked) => Some((asked, self.questions.get(asked.question)?)),
            Entry::Fixed(_) => None,
        }
    }

    /// The verdict from the statement's answer: ordinals from 1 of the visible rows, `None` = row security doesn't
    /// apply.
    pub(super) fn verdict(&self, question: &Question, ordinals: Option<Vec<i64>>) -> Verdict {
        let Some(ordinals) = ordinals else { return decided(&question.access, vec![true; self.images]) };
        let mut visible = vec![false; self.images];
        for ordinal in ordinals {
            let row = usize::try_from(ordinal - 1).ok().and_then(|row| question.indexes.get(row));
            if let Some(seen) = row.and_then(|index| visible.get_mut(*index)) {
                *seen = true;
            }
        }
        decided(&question.access, visible)
    }

    /// Bytes of images that one identity's statement carries, at most.
    pub(super) fn image_bytes(&self) -> usize {
        let bytes = |question: &Question| question.rows.iter().map(String::len).sum();
        self.questions.iter().map(bytes).max().unwrap_or(0)
    }

    /// (identity, image) pairs that are denied since the image lacks a column that the policies read (R-RLS-4).
    pub(super) fn unjudgeable(&self) -> usize {
        let missing = |at: usize| self.asked(at).map_or(0, |(_, question)| self.images - question.rows.len());
        self.to_ask().into_iter().map(missing).sum()
    }

    fn role(&mut self, request: &CheckRequest<'_>, table: &TableCatalog, word: &str) -> RolePlan {
        let role = match by_privilege(request, table, word) {
            Ok(role) => role,
            Err(verdict) => return RolePlan::Fixed(verdict),
        };
        let (Some(access), Some(using)) = (table.access(&role), table.effective(&role)) else {
            return RolePlan::Fixed(Verdict::Error(IdentityErrorKind::UnknownRole));
        };
        let (mut rows, mut indexes) = (Vec::new(), Vec::new());
        for (n, image) in request.images.iter().enumerate() {
            if let Some(row) = statement::row_text(image, table, using) {
                rows.push(row);
                indexes.push(n);
            }
        }
        let (sql, access) = (statement::verdicts(table, using), Arc::clone(access));
        self.questions.push(Question { role, sql, rows, indexes, access });
        RolePlan::Ask(self.questions.len() - 1)
    }
}

/// PostgREST's old `request.jwt.claim.sub`.
fn subject(identity: &Identity) -> String {
    #[derive(serde::Deserialize)]
    struct Subject {
        sub: String,
    }
    serde_json::from_str(identity.claims.as_json()).map_or_else(|_| String::new(), |Subject { sub }| sub)
}

enum RolePlan {
    Fixed(Verdict),
    Ask(usize),
}

/// Verdicts where no policy has a say: row security is off.
pub(super) fn without_policies(request: &CheckRequest<'_>, table: &TableCatalog) -> Vec<Verdict> {
    let verdict = |identity: &Identity| match by_privilege(request, table, &identity.role) {
        Ok(role) => all(request, table, &role),
        Err(verdict) => verdict,
    };
    request.identities.iter().map(verdict).collect()
}

/// What allow-list and privileges say (R-RLS-3, R-RLS-8): the database role whose policies decide, or the verdict.
fn by_privilege(request: &CheckRequest<'_>, table: &TableCatalog, word: &str) -> Result<String, Verdict> {
    let unknown = || Verdict::Error(IdentityErrorKind::UnknownRole);
    let role = allowed_role(request.project, word, request.extra_roles).ok_or_else(unknown)?;
    let access = table.access(&role).ok_or_else(unknown)?;
    if !access.any() {
        return Err(decided(access, vec![false; request.images.len()]));
    }
    // Row security doesn't bind the project's back end; nobody ever becomes this role.
    if word == SERVICE_ROLE { Err(all(request, table, &role)) } else { Ok(role.to_string()) }
}

fn all(request: &CheckRequest<'_>, table: &TableCatalog, role: &str) -> Verdict {
    match table.access(role) {
        Some(access) => decided(access, vec![true; request.images.len()]),
        None => Verdict::Error(IdentityErrorKind::UnknownRole),
    }
}

fn decided(access: &Arc<RoleAccess>, visible: Vec<bool>) -> Verdict {
    Verdict::Decided { access: Arc::clone(access), visible }
}
