//! PostgreSQL's `LIKE` under a deterministic collation in a UTF-8 database.

/// A checked pattern.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LikePattern(Vec<Token>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Token {
    /// `%`
    Any,
    /// `_`
    One,
    Char(char),
}

impl LikePattern {
    /// `None`: it ends with an escape character, which PostgreSQL raises an error for.
    pub(crate) fn parse(pattern: &str) -> Option<Self> {
        let mut tokens = Vec::with_capacity(pattern.len());
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            let token = match c {
                '\\' => Token::Char(chars.next()?),
                '%' if tokens.last() == Some(&Token::Any) => continue,
                '%' => Token::Any,
                '_' => Token::One,
                c => Token::Char(c),
            };
            tokens.push(token);
        }
        Some(Self(tokens))
    }

    /// Whether the text fits. Time is at most the product of both lengths.
    pub(crate) fn matches(&self, text: &str) -> bool {
        let (mut at, mut rest) = (0, text);
        // Where to go on after the last `%`: that one swallows a character more.
        let mut retry: Option<(usize, &str)> = None;
        loop {
            let mut chars = rest.chars();
            let fits = match self.0.get(at) {
                Some(Token::Any) => {
                    at += 1;
                    if at == self.0.len() {
                        return true;
                    }
                    retry = Some((at, rest));
                    continue;
                }
                Some(Token::One) => chars.next().is_some(),
                Some(Token::Char(c)) => chars.next() == Some(*c),
                None if rest.is_empty() => return true,
                None => false,
            };
            if fits {
                (at, rest) = (at + 1, chars.as_str());
                continue;
            }
            let Some((after, from)) = retry else { return false };
            let mut chars = from.chars();
            if chars.next().is_none() {
                return false;
            }
            (at, rest) = (after, chars.as_str());
            retry = Some((after, rest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percent_underscore_and_escapes() {
        for (pattern, fitting, unfitting) in [
            ("abc", &["abc"][..], &["ab", "abcd", "Abc", ""][..]),
            ("", &[""], &["a"]),
            ("%", &["", "a", "é\n"], &[]),
            ("a%", &["a", "ab"], &["ba", ""]),
            ("%b%c", &["bc", "abxc", "bcbc"], &["cb", "bcd"]),
            ("_é_", &["aéb", "éééé".get(0..6).expect("three letters")], &["é", "aébc"]),
            ("50\\%", &["50%"], &["50x", "50\\%"]),
            ("a\\\\b", &["a\\b"], &["a\\\\b"]),
            ("%__", &["ab", "abc"], &["a"]),
        ] {
            let parsed = LikePattern::parse(pattern).expect("a pattern");
            assert!(fitting.iter().all(|text| parsed.matches(text)), "{pattern}");
            assert!(!unfitting.iter().any(|text| parsed.matches(text)), "{pattern}");
        }
        assert_eq!(LikePattern::parse("a\\"), None);
    }
}
