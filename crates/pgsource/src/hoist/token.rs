//! Just as much of SQL's lexical rules as `pg_get_expr` needs.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// An identifier or keyword without quotes.
    Word,
    /// `"…"`
    Quoted,
    /// `'…'` or `E'…'`
    Literal,
    Number,
    /// An operator or punctuation.
    Symbol,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Token<'a> {
    pub(super) kind: Kind,
    pub(super) text: &'a str,
    /// Byte offset.
    pub(super) at: usize,
}

impl Token<'_> {
    pub(super) fn is_name(&self) -> bool {
        matches!(self.kind, Kind::Word | Kind::Quoted)
    }

    /// Without quotes; a name that has one inside isn't any of ours.
    pub(super) fn name(&self) -> &str {
        self.text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(self.text)
    }

    /// A literal's value; `None` where it holds escapes.
    pub(super) fn literal(&self) -> Option<&str> {
        let inner = self.text.strip_prefix('\'')?.strip_suffix('\'')?;
        (!inner.contains('\'')).then_some(inner)
    }
}

/// Splits a text; `None` if a quote isn't closed.
pub(super) fn tokens(source: &str) -> Option<Vec<Token<'_>>> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while let Some(first) = source[at..].chars().next() {
        if first.is_whitespace() {
            at += first.len_utf8();
            continue;
        }
        let (kind, len) = next(&source[at..], first)?;
        tokens.push(Token { kind, text: &source[at..at + len], at });
        at += len;
    }
    Some(tokens)
}

fn next(rest: &str, first: char) -> Option<(Kind, usize)> {
    let run = |fits: fn(char) -> bool| rest.find(|c| !fits(c)).unwrap_or(rest.len());
    Some(match first {
        '"' => (Kind::Quoted, quoted(rest, '"', false)?),
        '\'' => (Kind::Literal, quoted(rest, '\'', false)?),
        'E' if rest[1..].starts_with('\'') => (Kind::Literal, 1 + quoted(&rest[1..], '\'', true)?),
        _ if is_word(first) && !first.is_ascii_digit() => (Kind::Word, run(|c| is_word(c) || c == '$')),
        _ if first.is_ascii_digit() => (Kind::Number, run(|c| c.is_ascii_alphanumeric() || c == '.')),
        _ if rest.starts_with("::") => (Kind::Symbol, 2),
        _ if is_operator(first) => (Kind::Symbol, run(is_operator)),
        _ => (Kind::Symbol, first.len_utf8()),
    })
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_' || !c.is_ascii()
}

fn is_operator(c: char) -> bool {
    "+-*/<>=~!@#%^&|`?".contains(c)
}

/// Bytes up to and with the closing quote; a doubled one doesn't close.
fn quoted(rest: &str, quote: char, escapes: bool) -> Option<usize> {
    let mut chars = rest.char_indices().skip(1).peekable();
    while let Some((at, c)) = chars.next() {
        if escapes && c == '\\' {
            chars.next()?;
        } else if c == quote && chars.next_if(|(_, next)| *next == quote).is_none() {
            return Some(at + 1);
        }
    }
    None
}
