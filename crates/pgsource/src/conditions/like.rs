//! PostgreSQL's `LIKE` under a deterministic collation in a UTF-8 database.

/// A checked pattern: the parts between its `%`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct LikePattern(Vec<Part>);

/// What stands between two `%`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Part {
    Plain(String),
    /// With `_`, which is `None`.
    Blanks(Vec<Option<char>>),
}

/// Longest part with `_`: it is tried at every character of a text, plain ones are found in linear time.
const MAX_BLANKS: usize = 64;

impl LikePattern {
    /// `None`: it ends with an escape character, which PostgreSQL raises an error for.
    pub(crate) fn parse(pattern: &str) -> Option<Self> {
        let (mut parts, mut part) = (Vec::new(), Vec::new());
        let mut chars = pattern.chars();
        while let Some(c) = chars.next() {
            match c {
                '\\' => part.push(Some(chars.next()?)),
                '_' => part.push(None),
                '%' => parts.push(Part::new(std::mem::take(&mut part))),
                c => part.push(Some(c)),
            }
        }
        parts.push(Part::new(part));
        Some(Self(parts))
    }

    /// Whether matching takes little time whatever the text.
    pub(crate) fn is_cheap(&self) -> bool {
        self.0.iter().all(|part| matches!(part, Part::Plain(_)) || part.chars() <= MAX_BLANKS)
    }

    /// Whether the text fits.
    pub(crate) fn matches(&self, text: &str) -> bool {
        let [first, middle @ .., last] = self.0.as_slice() else {
            return self.0.first().is_some_and(|only| only.at_start(text) == Some(""));
        };
        let Some(mut rest) = first.at_start(text) else { return false };
        // The leftmost place leaves the most for what follows.
        for part in middle {
            match part.anywhere(rest) {
                Some(after) => rest = after,
                None => return false,
            }
        }
        last.at_end(rest)
    }
}

impl Part {
    fn new(chars: Vec<Option<char>>) -> Self {
        chars.iter().copied().collect::<Option<String>>().map_or(Self::Blanks(chars), Self::Plain)
    }

    fn chars(&self) -> usize {
        match self {
            Self::Plain(text) => text.chars().count(),
            Self::Blanks(chars) => chars.len(),
        }
    }

    /// What follows the part at the start of the text.
    fn at_start<'t>(&self, text: &'t str) -> Option<&'t str> {
        match self {
            Self::Plain(plain) => text.strip_prefix(plain.as_str()),
            Self::Blanks(wanted) => {
                let mut chars = text.chars();
                let fits = wanted.iter().all(|wanted| match (wanted, chars.next()) {
                    (_, None) => false,
                    (None, Some(_)) => true,
                    (Some(wanted), Some(c)) => *wanted == c,
                });
                fits.then_some(chars.as_str())
            }
        }
    }

    /// What follows the part's first place in the text.
    fn anywhere<'t>(&self, text: &'t str) -> Option<&'t str> {
        match self {
            Self::Plain(plain) => text.find(plain.as_str()).map(|at| &text[at + plain.len()..]),
            Self::Blanks(_) => text.char_indices().find_map(|(at, _)| self.at_start(&text[at..])),
        }
    }

    fn at_end(&self, text: &str) -> bool {
        match self {
            Self::Plain(plain) => text.ends_with(plain.as_str()),
            Self::Blanks(wanted) => {
                let start = text.char_indices().rev().nth(wanted.len() - 1);
                start.is_some_and(|(at, _)| self.at_start(&text[at..]) == Some(""))
            }
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
            ("a%a", &["aa", "aba"], &["a"]),
            ("%a_c%c", &["abcc", "xabcabcc"], &["abc", "a"]),
            ("%%", &["", "x"], &[]),
        ] {
            let parsed = LikePattern::parse(pattern).expect("a pattern");
            assert!(fitting.iter().all(|text| parsed.matches(text)), "{pattern}");
            assert!(!unfitting.iter().any(|text| parsed.matches(text)), "{pattern}");
        }
        assert_eq!(LikePattern::parse("a\\"), None);
        let cheap = |pattern: &str| LikePattern::parse(pattern).is_some_and(|pattern| pattern.is_cheap());
        assert!(cheap(&"a".repeat(1000)) && cheap("_%_%_") && !cheap(&"_".repeat(65)));
    }
}
