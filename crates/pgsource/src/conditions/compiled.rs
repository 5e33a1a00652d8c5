//! A condition that was checked against its column.

use std::sync::Arc;

use aura_domain::{Cell, Image, Value};

use super::{Answers, Condition, Exact, Key, LikePattern, Question};
use crate::Column;

/// What became of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Truth {
    /// It holds.
    True,
    /// It doesn't.
    False,
    /// NULL: it doesn't hold, and its opposite doesn't either.
    Null,
    /// It could not be decided: PostgreSQL raised an error or was late, or the value is of another type.
    Failed,
    /// PostgreSQL is to be asked first.
    Open,
}

impl std::ops::Not for Truth {
    type Output = Self;
    fn not(self) -> Self {
        match self {
            Self::True => Self::False,
            Self::False => Self::True,
            other => other,
        }
    }
}

/// Who decides a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecidedBy {
    /// This program, on text forms.
    Us,
    /// PostgreSQL, in a statement of its own.
    Postgres,
}

/// One condition of one subscription, and what it came to for one image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explained<'a> {
    /// As the client wrote it: column, operator, `not.`, values.
    pub condition: &'a Condition,
    /// Who decides it.
    pub by: DecidedBy,
    /// What it came to; only [`Truth::True`] lets the event through.
    pub truth: Truth,
}

/// What a condition is compiled against. Length and scale of a type don't change how its values compare.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// The column's type, a domain as it is.
    pub(crate) column_type: u32,
    /// What is compared: the type below all domains, and text for varchar.
    pub(crate) base: u32,
    /// `pg_attribute.attcollation`.
    pub(crate) collation: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Test {
    IsNull,
    IsBool(bool),
    /// `eq` and `in`: sorted keys, and whether NULL is in the list.
    OneOf(Exact, Vec<Key>, bool),
    Neq(Exact, Key),
    Lt(Exact, Key),
    Lte(Exact, Key),
    Gt(Exact, Key),
    Gte(Exact, Key),
    Distinct(Exact, Key),
    Like(LikePattern),
    Ask(Arc<Question>),
    /// The same for `in`, and whether NULL is in the list.
    AskAny(Vec<Arc<Question>>, bool),
    AskDistinct(Arc<Question>),
}

/// See the module. Equal ones are true of the same images.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Compiled {
    condition: Condition,
    shape: Shape,
    test: Test,
}

/// How an index finds the conditions that hold for a value: one with the same look-up and the value's key among its keys.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Lookup {
    column: String,
    shape: Shape,
    exact: Exact,
}

impl Lookup {
    /// The image's key; `None`: no value, so nothing holds. `Err`: it can't be decided.
    pub fn key(&self, image: &Image) -> Result<Option<Key>, Undecided> {
        let Some(cell) = cell(image, &self.column) else { return Ok(None) };
        match &cell.value {
            Value::Null | Value::Unchanged => Ok(None),
            Value::Text(text) if self.shape.fits(cell) => self.exact.key(text).map(Some).ok_or(Undecided),
            Value::Text(_) => Err(Undecided),
        }
    }

    /// See [`Compiled::column`].
    pub fn column(&self) -> &str {
        &self.column
    }
}

/// A value that isn't of the type that a condition was compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Undecided;

impl Shape {
    /// Of a column as the catalogue shows it.
    pub fn of(column: &Column) -> Self {
        const TEXT: u32 = 25;
        const VARCHAR: u32 = 1043;
        let base = if column.ty.base_oid == VARCHAR { TEXT } else { column.ty.base_oid };
        Self { column_type: column.ty.oid, base, collation: column.collation }
    }

    /// A value of a type that the column had before, or has since, can't be compared.
    fn fits(self, cell: &Cell) -> bool {
        [0, self.column_type, self.base].contains(&cell.type_oid)
    }
}

impl Compiled {
    pub(crate) fn new(condition: Condition, shape: Shape, test: Test) -> Self {
        Self { condition, shape, test }
    }

    /// As written.
    pub fn condition(&self) -> &Condition {
        &self.condition
    }

    /// The column's name.
    pub fn column(&self) -> &str {
        &self.condition.column
    }

    /// What it was compiled against.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Who decides it.
    pub fn decided_by(&self) -> DecidedBy {
        match self.test {
            Test::Ask(_) | Test::AskAny(..) | Test::AskDistinct(_) => DecidedBy::Postgres,
            _ => DecidedBy::Us,
        }
    }

    /// How an index finds it, and under which keys; only `eq` and `in` of types that have keys.
    pub fn lookup(&self) -> Option<(Lookup, &[Key])> {
        match &self.test {
            Test::OneOf(exact, keys, _) if !self.condition.negated => {
                let (column, shape, exact) = (self.condition.column.clone(), self.shape, *exact);
                Some((Lookup { column, shape, exact }, keys))
            }
            _ => None,
        }
    }

    /// What it comes to for an image. A column that the image lacks, and one whose value the log didn't repeat, fulfil
    /// nothing, `is.null` included (supabase-wire.md §3.4, §3.6).
    pub fn truth(&self, image: &Image, answers: &mut Answers) -> Truth {
        let Some(cell) = cell(image, &self.condition.column) else { return Truth::False };
        let truth = match &cell.value {
            Value::Unchanged => return Truth::False,
            Value::Null => self.of_null(),
            Value::Text(_) if matches!(self.test, Test::IsNull) => Truth::False,
            Value::Text(_) if !self.shape.fits(cell) => Truth::Failed,
            Value::Text(text) => self.of_text(text, answers),
        };
        if self.condition.negated { !truth } else { truth }
    }

    /// For an explanation: which condition, with which values, decided by whom, and what it came to.
    pub fn explain(&self, image: &Image, answers: &mut Answers) -> Explained<'_> {
        Explained { condition: &self.condition, by: self.decided_by(), truth: self.truth(image, answers) }
    }

    fn of_null(&self) -> Truth {
        match &self.test {
            Test::IsNull | Test::Distinct(..) | Test::AskDistinct(_) => Truth::True,
            Test::IsBool(_) => Truth::False,
            // `null = any ('{}')` is false, not null.
            Test::OneOf(_, keys, null) if keys.is_empty() && !null => Truth::False,
            Test::AskAny(questions, null) if questions.is_empty() && !null => Truth::False,
            _ => Truth::Null,
        }
    }

    fn of_text(&self, text: &str, answers: &mut Answers) -> Truth {
        let keyed =
            |exact: &Exact, holds: &dyn Fn(&Key) -> bool| exact.key(text).map_or(Truth::Failed, |key| is(holds(&key)));
        match &self.test {
            Test::IsNull => Truth::False,
            Test::IsBool(wanted) => is((text == "t") == *wanted),
            Test::OneOf(exact, keys, null) => match keyed(exact, &|key| keys.binary_search(key).is_ok()) {
                Truth::False if *null => Truth::Null,
                truth => truth,
            },
            Test::Neq(exact, wanted) | Test::Distinct(exact, wanted) => keyed(exact, &|key| key != wanted),
            Test::Lt(exact, bound) => keyed(exact, &|key| key < bound),
            Test::Lte(exact, bound) => keyed(exact, &|key| key <= bound),
            Test::Gt(exact, bound) => keyed(exact, &|key| key > bound),
            Test::Gte(exact, bound) => keyed(exact, &|key| key >= bound),
            Test::Like(pattern) => is(pattern.matches(text)),
            Test::Ask(question) => answers.look(question, text),
            Test::AskDistinct(question) => !answers.look(question, text),
            Test::AskAny(questions, null) => any(questions, *null, text, answers),
        }
    }
}

/// `= any (…)`: true if one is; else what isn't known keeps it from being false.
fn any(questions: &[Arc<Question>], null: bool, text: &str, answers: &mut Answers) -> Truth {
    let mut all = if null { Truth::Null } else { Truth::False };
    // Every one is looked up, so that all that are open are asked at once.
    for question in questions {
        all = match (all, answers.look(question, text)) {
            (Truth::True, _) | (_, Truth::True) => Truth::True,
            (Truth::Failed, _) | (_, Truth::Failed) => Truth::Failed,
            (Truth::Open, _) | (_, Truth::Open) => Truth::Open,
            (Truth::Null, _) | (_, Truth::Null) => Truth::Null,
            (Truth::False, Truth::False) => Truth::False,
        };
    }
    all
}

fn cell<'a>(image: &'a Image, column: &str) -> Option<&'a Cell> {
    image.0.iter().find(|cell| &*cell.name == column)
}

fn is(holds: bool) -> Truth {
    if holds { Truth::True } else { Truth::False }
}
