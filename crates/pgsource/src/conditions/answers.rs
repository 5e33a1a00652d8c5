//! What PostgreSQL was asked about values, and what it said.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use super::Truth;

/// An operator of PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Symbol {
    /// `=`
    Eq,
    /// `<>`
    Ne,
    /// `<`
    Lt,
    /// `<=`
    Le,
    /// `>`
    Gt,
    /// `>=`
    Ge,
    /// `~~`
    Like,
    /// `~~*`
    Ilike,
    /// `~`
    Match,
    /// `~*`
    Imatch,
}

impl Symbol {
    /// Its name in `pg_operator`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eq => "=",
            Self::Ne => "<>",
            Self::Lt => "<",
            Self::Le => "<=",
            Self::Gt => ">",
            Self::Ge => ">=",
            Self::Like => "~~",
            Self::Ilike => "~~*",
            Self::Match => "~",
            Self::Imatch => "~*",
        }
    }

    /// Whether its right side is a pattern, not a value of the column's type.
    pub(crate) fn takes_pattern(self) -> bool {
        matches!(self, Self::Like | Self::Ilike | Self::Match | Self::Imatch)
    }
}

/// `value <symbol> operand` as one role sees it: what the type's functions may do depends on who calls them.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Question {
    /// Role word of the subscriber.
    pub role: String,
    /// The column's type, a domain as it is.
    pub column_type: u32,
    /// The type that is compared: below all domains, and text for varchar.
    pub base: u32,
    /// `pg_collation.oid`, 0 for none.
    pub collation: u32,
    /// Operator.
    pub symbol: Symbol,
    /// What the filter says.
    pub operand: String,
}

/// Of one question: each value's answer; `None` = PostgreSQL couldn't tell.
type Known = HashMap<Arc<str>, Option<Option<bool>>>;

/// Answers of PostgreSQL, and the questions that are open.
#[derive(Debug, Default)]
pub struct Answers {
    known: HashMap<Arc<Question>, Known>,
    open: HashMap<Arc<Question>, HashSet<Arc<str>>>,
    /// Pairs of a question and a value in `open`.
    pairs: usize,
    /// Each value once, however many questions are about it.
    values: HashSet<Arc<str>>,
}

impl Answers {
    /// The answer; if there is none yet, the question is noted as open.
    pub(crate) fn look(&mut self, question: &Arc<Question>, value: &str) -> Truth {
        match self.known.get(question).and_then(|known| known.get(value)) {
            Some(Some(Some(true))) => Truth::True,
            Some(Some(Some(false))) => Truth::False,
            Some(Some(None)) => Truth::Null,
            Some(None) => Truth::Failed,
            None => {
                let open = self.open.entry(Arc::clone(question)).or_default();
                if !open.contains(value) {
                    let shared = match self.values.get(value) {
                        Some(shared) => Arc::clone(shared),
                        None => Arc::from(value),
                    };
                    self.values.insert(Arc::clone(&shared));
                    open.insert(shared);
                    self.pairs += 1;
                }
                Truth::Open
            }
        }
    }

    /// Whether something is to be asked.
    pub fn has_open(&self) -> bool {
        !self.open.is_empty()
    }

    /// How much: pairs of a question and a value.
    pub fn open_pairs(&self) -> usize {
        self.pairs
    }

    /// Takes what is to be asked: every question with its distinct values.
    pub(crate) fn take_open(&mut self) -> Vec<(Arc<Question>, Vec<Arc<str>>)> {
        self.pairs = 0;
        self.open.drain().map(|(question, values)| (question, values.into_iter().collect())).collect()
    }

    /// Notes an answer; `None`: PostgreSQL couldn't tell.
    pub(crate) fn note(&mut self, question: &Arc<Question>, value: Arc<str>, answer: Option<Option<bool>>) {
        self.known.entry(Arc::clone(question)).or_default().insert(value, answer);
    }

    /// Whatever is still open won't be answered.
    pub fn give_up(&mut self) {
        for (question, values) in self.take_open() {
            for value in values {
                self.note(&question, value, None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_mem_2_questions_about_a_value_share_it_and_are_counted() {
        let question = |operand: &str| {
            let (role, operand) = ("anon".to_owned(), operand.to_owned());
            Arc::new(Question { role, column_type: 25, base: 25, collation: 100, symbol: Symbol::Ilike, operand })
        };
        let mut answers = Answers::default();
        for operand in ["%a%", "%b%", "%a%"] {
            assert_eq!(answers.look(&question(operand), "text"), Truth::Open);
        }
        assert_eq!(answers.open_pairs(), 2);
        let asked = answers.take_open();
        let values: Vec<&Arc<str>> = asked.iter().flat_map(|(_, values)| values).collect();
        assert!(values.len() == 2 && Arc::ptr_eq(values[0], values[1]));
        assert_eq!(answers.open_pairs(), 0);
    }
}
