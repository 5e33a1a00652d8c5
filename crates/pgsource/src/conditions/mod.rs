//! Conditions of filters, with PostgreSQL's semantics: the grammar, what is decided here on the text forms of the log
//! (`exact`, `like`), and what remains to be asked of PostgreSQL ([`crate::visibility`] does, [`Answers`] keep what it
//! said). Nothing is guessed: a type or collation that isn't known to be decided exactly is PostgreSQL's.

mod answers;
mod compiled;
mod exact;
mod grammar;
mod like;

pub use answers::{Answers, Question, Symbol};
pub use compiled::{Compiled, DecidedBy, Explained, Lookup, Shape, Truth, Undecided};
pub use exact::{Decimal, Key};
pub use grammar::{Condition, GrammarError, MAX_IN, Operator, parse};

pub(crate) use compiled::Test;
pub(crate) use exact::Exact;
pub(crate) use like::LikePattern;
