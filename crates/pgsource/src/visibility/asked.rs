//! Those who are asked in one round trip, as the statements take them.

use super::{
    CheckRequest, Identity,
    plan::{Question, subject},
};

/// Some identities, in order: first those of the statement for many, then those asked alone.
pub(super) struct Asked<'a> {
    pub(super) claims: Vec<&'a str>,
    pub(super) subs: Vec<String>,
    /// How many the statement for many asks.
    many: usize,
    /// Where each wants to know of a few images only.
    few: Option<Few>,
}

/// Who wants which images, by ordinals from 1.
struct Few {
    /// Identities of the statement for many, and an image of each; those of one are together.
    who: Vec<i64>,
    which: Vec<i64>,
    /// Of those asked alone: their images.
    images: Vec<Vec<String>>,
}

/// One who is asked alone.
pub(super) struct Alone<'a> {
    pub(super) claims: &'a str,
    pub(super) sub: &'a str,
    pub(super) images: &'a [String],
}

impl<'a> Asked<'a> {
    pub(super) fn new(request: &CheckRequest<'a>, question: &Question<'_>, many: &[usize], alone: &[usize]) -> Self {
        let identities: Vec<&'a Identity> = many.iter().chain(alone).map(|at| &request.identities[*at]).collect();
        let claims = identities.iter().map(|identity| identity.claims.as_json()).collect();
        let few = question.wants.as_ref().map(|_| Few::new(question, many, alone));
        Self { claims, subs: identities.into_iter().map(subject).collect(), many: many.len(), few }
    }

    /// Claims and `sub` of those that the statement for many asks.
    pub(super) fn many(&self) -> (&[&'a str], &[String]) {
        (&self.claims[..self.many], &self.subs[..self.many])
    }

    /// Their (identity, image) pairs, if not all images matter to each.
    pub(super) fn pairs(&self) -> Option<(&[i64], &[i64])> {
        self.few.as_ref().map(|few| (few.who.as_slice(), few.which.as_slice()))
    }

    pub(super) fn alone<'b>(&'b self, question: &'b Question<'_>) -> impl Iterator<Item = Alone<'b>> {
        let images = move |n: usize| self.few.as_ref().map_or(question.rows.as_slice(), |few| &few.images[n]);
        let both = self.claims[self.many..].iter().zip(&self.subs[self.many..]).enumerate();
        both.map(move |(n, (claims, sub))| Alone { claims, sub, images: images(n) })
    }
}

impl Few {
    fn new(question: &Question<'_>, many: &[usize], alone: &[usize]) -> Self {
        let (mut who, mut which) = (Vec::new(), Vec::new());
        for (at, n) in many.iter().zip(1..) {
            let wanted = question.wanted(*at);
            who.extend(wanted.iter().map(|_| n));
            which.extend(wanted);
        }
        let row = |ordinal: &i64| usize::try_from(*ordinal - 1).ok().and_then(|n| question.rows.get(n)).cloned();
        let images = alone.iter().map(|at| question.wanted(*at).iter().filter_map(row).collect()).collect();
        Self { who, which, images }
    }
}
