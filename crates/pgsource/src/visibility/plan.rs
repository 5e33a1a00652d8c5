//! What each identity must be asked, decided from the catalogue alone where that is enough.

use std::{collections::HashMap, sync::Arc, time::Instant};

use super::{
    CheckRequest, Identity, IdentityErrorKind, Verdict,
    standing::{Ask, Standing},
    statement,
};
use crate::{
    catalog::{Effective, RoleAccess, TableCatalog},
    roles::{SERVICE_ROLE, allowed_role},
};

/// Standing of identities; the circuit of a role word opens for all that have it.
pub(super) type Identities = Standing<Identity, String>;

/// The plan of one check against one catalogue state.
pub(super) struct Plan<'a> {
    /// One per identity of the request; `None`: somebody's question tells.
    verdicts: Vec<Option<Verdict>>,
    /// One per role that must be asked.
    pub(super) questions: Vec<Question<'a>>,
}

/// What all identities of one role are asked.
pub(super) struct Question<'a> {
    /// Database role.
    pub(super) role: String,
    /// Role word of the tokens.
    pub(super) word: &'a str,
    /// Whether the policies have a say, as far as the catalogue says. If not, they aren't even planned: that would
    /// evaluate parts of them.
    pub(super) bound: bool,
    /// For many at once, if the policies allow that.
    pub(super) joined: Option<String>,
    /// For many, one after the other, and what is run for each.
    pub(super) looped: (String, String),
    /// For one.
    pub(super) alone: String,
    /// The distinct images that can be judged, as text of the row type.
    pub(super) rows: Vec<String>,
    /// By identity: which of [`Self::rows`] matter, by ordinals from 1. `None`: (nearly) all of them to everybody.
    pub(super) wants: Option<HashMap<usize, Vec<i64>>>,
    /// Which of [`Self::rows`] each image of the request is; `None`: it lacks a column that the policies read.
    row_of: Vec<Option<usize>>,
    access: Arc<RoleAccess>,
    /// Identities asked together, by their index in the request.
    pub(super) together: Vec<usize>,
    /// Those asked under a savepoint each.
    pub(super) apart: Vec<usize>,
    /// Those not asked, for whom somebody must find out whether they can be.
    pub(super) probes: Vec<usize>,
}

impl<'a> Plan<'a> {
    pub(super) fn new(request: &CheckRequest<'a>, table: &TableCatalog, standing: &Identities) -> Self {
        let verdicts = vec![None; request.identities.len()];
        let mut plan = Self { verdicts, questions: Vec::new() };
        let mut by_word: HashMap<&'a str, Vec<usize>> = HashMap::new();
        for (n, identity) in request.identities.iter().enumerate() {
            by_word.entry(&identity.role).or_default().push(n);
        }
        for (word, members) in by_word {
            match Question::new(request, table, word, &members) {
                Ok(question) => plan.ask(request, question, &members, standing),
                Err(verdict) => members.into_iter().for_each(|n| plan.verdicts[n] = Some(verdict.clone())),
            }
        }
        plan
    }

    fn ask(
        &mut self,
        request: &CheckRequest<'a>,
        mut question: Question<'a>,
        members: &[usize],
        standing: &Identities,
    ) {
        let who = members.iter().map(|n| &request.identities[*n]);
        let asks = standing.how(request.relation, &question.word.to_owned(), who, Instant::now());
        for (n, ask) in members.iter().zip(asks) {
            match ask {
                Ask::Together => question.together.push(*n),
                Ask::Apart => question.apart.push(*n),
                Ask::Not { probe } => {
                    self.verdicts[*n] = Some(Verdict::Error(IdentityErrorKind::CircuitOpen));
                    question.probes.extend(probe.then_some(*n));
                }
            }
        }
        self.questions.push(question);
    }

    /// (identity, image) pairs that are denied since the image lacks a column that the policies read (R-RLS-4).
    pub(super) fn unjudgeable(&self, request: &CheckRequest<'_>) -> usize {
        let missing = |question: &Question<'_>| -> usize {
            let lacks = |image: &usize| question.row_of.get(*image).is_some_and(Option::is_none);
            let all = question.row_of.iter().filter(|row| row.is_none()).count();
            let of = |at: &usize| match request.wanted.and_then(|wanted| wanted.get(*at)) {
                Some(images) if all > 0 => images.iter().filter(|image| lacks(image)).count(),
                _ => all,
            };
            question.together.iter().chain(&question.apart).map(of).sum()
        };
        self.questions.iter().map(missing).sum()
    }

    /// All verdicts in the request's order: those that needed no question, and these.
    pub(super) fn fill(self, answered: impl IntoIterator<Item = (usize, Verdict)>) -> Vec<Verdict> {
        let mut verdicts = self.verdicts;
        for (at, verdict) in answered {
            verdicts[at] = Some(verdict);
        }
        // Nobody is left without: but an error is never "allowed".
        verdicts
            .into_iter()
            .map(|verdict| verdict.unwrap_or(Verdict::Error(IdentityErrorKind::ConnectionLost)))
            .collect()
    }
}

impl<'a> Question<'a> {
    /// Or the verdict of everybody who has the role word.
    fn new(
        request: &CheckRequest<'a>,
        table: &TableCatalog,
        word: &'a str,
        members: &[usize],
    ) -> Result<Self, Verdict> {
        let role = by_privilege(request, table, word)?;
        let (Some(access), Some(using)) = (table.access(&role), table.effective(&role)) else {
            return Err(Verdict::Error(IdentityErrorKind::UnknownRole));
        };
        if using.system_columns && using.bound {
            return Err(Verdict::Error(IdentityErrorKind::NotJudgeable));
        }
        let (rows, row_of) = distinct(request, table, using);
        let wants = wants(request, members, &rows, &row_of);
        let join = |hoisted| statement::joined(table, using, hoisted, wants.is_some());
        let joined = using.hoisted.as_ref().and_then(join);
        let (together, apart, probes) = Default::default();
        Ok(Self {
            looped: (statement::looped(table), statement::query(table, using)),
            alone: statement::alone(table, using),
            access: Arc::clone(access),
            bound: using.bound,
            role,
            word,
            joined,
            rows,
            wants,
            row_of,
            together,
            apart,
            probes,
        })
    }

    /// Whether there is anybody to ask.
    pub(super) fn asks(&self) -> bool {
        !self.together.is_empty() || !self.apart.is_empty()
    }

    /// The verdict from a statement's answer: ordinals from 1 of the visible rows.
    pub(super) fn verdict(&self, ordinals: &[i64]) -> Verdict {
        let mut seen = vec![false; self.rows.len()];
        for ordinal in ordinals {
            let row = usize::try_from(*ordinal - 1).ok().and_then(|row| seen.get_mut(row));
            if let Some(row) = row {
                *row = true;
            }
        }
        decided(&self.access, self.row_of.iter().map(|row| row.is_some_and(|row| seen[row])).collect())
    }

    /// The same where the ordinals count only what the identity wants.
    pub(super) fn verdict_of_wanted(&self, at: usize, ordinals: &[i64]) -> Verdict {
        if self.wants.is_none() {
            return self.verdict(ordinals);
        }
        let wanted = self.wanted(at);
        let row = |ordinal: &i64| usize::try_from(*ordinal - 1).ok().and_then(|n| wanted.get(n)).copied();
        self.verdict(&ordinals.iter().filter_map(row).collect::<Vec<_>>())
    }

    /// What matters to an identity, where [`Self::wants`] says.
    pub(super) fn wanted(&self, at: usize) -> &[i64] {
        self.wants.as_ref().and_then(|wants| wants.get(&at)).map_or(&[], Vec::as_slice)
    }

    /// How many of [`Self::rows`] one identity is asked about, on average.
    pub(super) fn images_of_each(&self) -> usize {
        let some = |wants: &HashMap<usize, Vec<i64>>| wants.values().map(Vec::len).sum::<usize>() / wants.len().max(1);
        self.wants.as_ref().map_or(self.rows.len(), some)
    }

    /// Row security doesn't bind the role.
    pub(super) fn everything(&self) -> Verdict {
        decided(&self.access, vec![true; self.row_of.len()])
    }

    /// Bytes of images that a statement carries.
    pub(super) fn bytes(&self) -> usize {
        self.rows.iter().map(String::len).sum()
    }
}

/// The images by what the policies read of them: the distinct ones, and which one each is.
fn distinct(request: &CheckRequest<'_>, table: &TableCatalog, using: &Effective) -> (Vec<String>, Vec<Option<usize>>) {
    let mut numbers: HashMap<String, usize> = HashMap::new();
    let row_of = request.images.iter().map(|image| {
        let text = statement::row_text(image, table, using)?;
        let next = numbers.len();
        Some(*numbers.entry(text).or_insert(next))
    });
    let row_of = row_of.collect();
    let mut rows = vec![String::new(); numbers.len()];
    for (text, n) in numbers {
        rows[n] = text;
    }
    (rows, row_of)
}

/// See [`Question::wants`]. Below a quarter of all pairs it is cheaper to name them.
fn wants(
    request: &CheckRequest<'_>,
    members: &[usize],
    rows: &[String],
    row_of: &[Option<usize>],
) -> Option<HashMap<usize, Vec<i64>>> {
    let wanted = request.wanted?;
    let ordinals = |at: &usize| {
        let images = wanted.get(*at).map_or(&[][..], Vec::as_slice);
        let mut of_rows: Vec<i64> = images.iter().filter_map(|n| *row_of.get(*n)?).map(|row| row as i64 + 1).collect();
        of_rows.sort_unstable();
        of_rows.dedup();
        (*at, of_rows)
    };
    let wants: HashMap<usize, Vec<i64>> = members.iter().map(ordinals).collect();
    let pairs: usize = wants.values().map(Vec::len).sum();
    (pairs * 4 < members.len() * rows.len()).then_some(wants)
}

/// PostgREST's old `request.jwt.claim.sub`: empty if it isn't a text.
pub(super) fn subject(identity: &Identity) -> String {
    #[derive(serde::Deserialize)]
    struct Subject {
        sub: String,
    }
    serde_json::from_str(identity.claims.as_json()).map_or_else(|_| String::new(), |Subject { sub }| sub)
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
