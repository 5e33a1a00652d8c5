//! Policies that only read their own row and the claims, rewritten so that one statement can judge them for many
//! identities: whatever is made of claims alone becomes a column of a relation with a row per identity.
//!
//! A statement whose sub-select reads a *setting* would be shared by identities (R-RLS-5); one that reads a column of
//! the identity's own row can't be. So this is done only where every use of the claims is seen: the policy depends on
//! nothing but its own table (`pg_depend`, so no function, operator or table that somebody made), it reads no other
//! relation, and calls only functions that are listed here, none of which can reach a setting. Anything else is asked
//! for one identity after the other, as is a batch in which the rewritten form raises an error: what is hoisted is
//! evaluated for every identity, though the policy might not have needed it.

mod token;

use std::fmt::Write as _;

use token::{Kind, Token, tokens};

/// Names of ours in the statement; a table that has such a column isn't rewritten.
pub(crate) const PREFIX: &str = "_aura_";
/// The claims as JSON, of the relation that the hoisted expressions read.
pub(crate) const CLAIMS: &str = "_aura_claims";
/// The claim `sub`, of the same relation.
pub(crate) const SUBJECT: &str = "_aura_subject";
/// The role word, of the same relation.
pub(crate) const WORD: &str = "_aura_word";

/// A policy's expression with the claims taken out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hoisted {
    /// Reads columns of the table and `_aura_c._aura_k<n>`.
    pub(crate) expression: String,
    /// What `_aura_k<n>` is, in terms of [`CLAIMS`], [`SUBJECT`] and [`WORD`].
    pub(crate) keys: Vec<String>,
}

/// Rewrites what `pg_get_expr` prints under an empty search_path. `None`: it can't be seen that nothing else depends
/// on the claims.
pub(crate) fn hoist(expression: &str) -> Option<Hoisted> {
    let text = Text { source: expression, tokens: tokens(expression)? };
    let uses = text.uses()?;
    let (mut keys, mut out, mut copied): (Vec<String>, String, usize) = (Vec::new(), String::new(), 0);
    for the_use in &uses {
        let span = text.widest(the_use);
        let key = text.key(span, the_use);
        let n = keys.iter().position(|known| *known == key).unwrap_or_else(|| {
            keys.push(key);
            keys.len() - 1
        });
        let (start, end) = text.bytes(span);
        out.push_str(&expression[copied..start]);
        // Writing to a String can't fail.
        let _ = write!(out, "{PREFIX}c.{PREFIX}k{n}");
        copied = end;
    }
    out.push_str(&expression[copied..]);
    Some(Hoisted { expression: out, keys })
}

/// Token indexes, first and last.
type Span = (usize, usize);

/// A call that reads something of the identity, and where that is in its row.
struct Use {
    span: Span,
    source: &'static str,
}

/// A function without arguments that stands for an expression.
struct Known {
    name: &'static str,
    /// OID of the type that it returns (`pg_type.dat`).
    returns: u32,
    /// Its text, but for white space between tokens: as bootstrap writes it, or as Supabase does.
    sources: [&'static str; 2],
    /// The same of an identity's row.
    key: &'static str,
}

const KNOWN: [Known; 3] = [
    Known {
        name: "auth.uid",
        returns: 2950,
        sources: [
            "select coalesce(nullif(current_setting('request.jwt.claim.sub', true), ''), \
             nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub')::uuid",
            "select coalesce(nullif(current_setting('request.jwt.claim.sub', true), ''), \
             (nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'sub'))::uuid",
        ],
        key: "(coalesce(nullif(_aura_subject, ''), nullif(_aura_claims, '')::jsonb ->> 'sub')::uuid)",
    },
    Known {
        name: "auth.role",
        returns: 25,
        sources: [
            "select coalesce(nullif(current_setting('request.jwt.claim.role', true), ''), \
             nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role')",
            "select coalesce(nullif(current_setting('request.jwt.claim.role', true), ''), \
             (nullif(current_setting('request.jwt.claims', true), '')::jsonb ->> 'role'))::text",
        ],
        key: "(coalesce(nullif(_aura_word, ''), nullif(_aura_claims, '')::jsonb ->> 'role'))",
    },
    Known {
        name: "auth.jwt",
        returns: 3802,
        sources: [
            "select coalesce(nullif(current_setting('request.jwt.claim', true), ''), \
             nullif(current_setting('request.jwt.claims', true), ''))::jsonb",
            "select coalesce(nullif(current_setting('request.jwt.claim', true), ''), \
             nullif(current_setting('request.jwt.claims', true), ''))::jsonb",
        ],
        key: "(coalesce(nullif(current_setting('request.jwt.claim', true), ''), nullif(_aura_claims, ''))::jsonb)",
    },
];

/// Whether it is known what a function does, by its name, return type and text: then [`hoist`] sees through it.
pub(crate) fn is_known(name: &str, returns: u32, source: &str) -> bool {
    let Some(known) = KNOWN.iter().find(|known| known.name == name && known.returns == returns) else { return false };
    // What else counts as white space to us doesn't to every PostgreSQL.
    let plain = |c: char| c.is_ascii_graphic() || c.is_ascii_whitespace();
    source.chars().all(plain) && known.sources.iter().any(|one| normal(one) == normal(source))
}

/// The tokens of a function's text. Comments are none of the known ones'.
fn normal(source: &str) -> Option<Vec<&str>> {
    let mut texts: Vec<&str> = tokens(source)?.iter().map(|token| token.text).collect();
    texts.pop_if(|last| *last == ";");
    Some(texts)
}

struct Text<'a> {
    source: &'a str,
    tokens: Vec<Token<'a>>,
}

/// Built-in functions that depend on nothing but their arguments and the time. Words of the grammar that stand before a
/// parenthesis are among them. `pg_get_expr` prints those in capitals.
const HARMLESS: [&str; 69] = [
    "ALL",
    "AND",
    "ANY",
    "ARRAY",
    "AS",
    "CASE",
    "COALESCE",
    "ELSE",
    "GREATEST",
    "ILIKE",
    "IN",
    "LEAST",
    "LIKE",
    "NOT",
    "NULLIF",
    "OR",
    "ROW",
    "SELECT",
    "THEN",
    "WHEN",
    "abs",
    "age",
    "array_length",
    "array_position",
    "array_to_string",
    "btrim",
    "cardinality",
    "ceil",
    "ceiling",
    "char_length",
    "character_length",
    "date_part",
    "date_trunc",
    "floor",
    "json_array_elements_text",
    "json_array_length",
    "json_extract_path",
    "json_extract_path_text",
    "json_typeof",
    "jsonb_array_elements_text",
    "jsonb_array_length",
    "jsonb_exists",
    "jsonb_exists_all",
    "jsonb_exists_any",
    "jsonb_extract_path",
    "jsonb_extract_path_text",
    "jsonb_typeof",
    "left",
    "length",
    "lower",
    "ltrim",
    "md5",
    "mod",
    "now",
    "num_nonnulls",
    "num_nulls",
    "octet_length",
    "position",
    "replace",
    "reverse",
    "right",
    "round",
    "rtrim",
    "sign",
    "split_part",
    "starts_with",
    "string_to_array",
    "substring",
    "upper",
];
/// After these a parenthesis only groups.
const GROUPING: [&str; 11] = ["AND", "CASE", "ELSE", "FROM", "ILIKE", "LIKE", "NOT", "OR", "SELECT", "THEN", "WHEN"];
/// Functions of one argument that are hoisted with it.
const OF_ONE: [&str; 7] = ["btrim", "char_length", "length", "lower", "ltrim", "rtrim", "upper"];
/// Operators that take something out of JSON.
const EXTRACTING: [&str; 4] = ["->", "->>", "#>", "#>>"];
/// Second words of type names.
const TYPE_WORDS: [&str; 6] = ["varying", "precision", "with", "without", "time", "zone"];

impl Text<'_> {
    /// Every place where the identity's settings are read; `None` if there may be others.
    fn uses(&self) -> Option<Vec<Use>> {
        let mut uses = Vec::new();
        for (at, token) in self.tokens.iter().enumerate() {
            let called = self.is(at + 1, "(");
            let typed = at > 0 && (self.is(at - 1, "::") || TYPE_WORDS.contains(&token.text));
            match token.kind {
                Kind::Word if token.text == "current_setting" && called => uses.extend(self.setting(at)?),
                Kind::Word if called && self.known(at).is_some() => uses.extend(self.known(at)),
                // A policy that reads rows, its own table's included: `IS DISTINCT FROM` doesn't.
                Kind::Word if token.text == "FROM" && !self.is_word(at.wrapping_sub(1), "DISTINCT") => return None,
                Kind::Word | Kind::Quoted if called && !typed && !HARMLESS.contains(&token.name()) => return None,
                // A whole row.
                Kind::Symbol if token.text == "." && self.is(at + 1, "*") => return None,
                _ => {}
            }
        }
        Some(uses)
    }

    /// `auth.uid()` and its like: `at` is the name behind the dot.
    fn known(&self, at: usize) -> Option<Use> {
        let schema = at.checked_sub(2).filter(|_| self.is(at - 1, "."))?;
        let (first, last) = (self.tokens.get(schema)?, self.tokens.get(at)?);
        let name = format!("{}.{}", first.text, last.text);
        let known = KNOWN.iter().find(|known| known.name == name)?;
        self.is(at + 2, ")").then_some(Use { span: (schema, at + 2), source: known.key })
    }

    /// `current_setting('…'::text)` or with a second argument; outer `None`: which setting can't be seen.
    fn setting(&self, at: usize) -> Option<Option<Use>> {
        let name = self.tokens.get(at + 2).filter(|token| token.kind == Kind::Literal)?;
        if !self.is(at + 3, "::") || !self.is_word(at + 4, "text") {
            return None;
        }
        // With null for the second argument it is null, whatever the setting: that one must be seen.
        let second = self.is(at + 5, ",") && (self.is_word(at + 6, "true") || self.is_word(at + 6, "false"));
        let end = if second { at + 7 } else { at + 5 };
        if !self.is(end, ")") {
            return None;
        }
        // Names of settings don't distinguish case.
        let source = match name.literal()?.to_ascii_lowercase().as_str() {
            "request.jwt.claims" => CLAIMS,
            "request.jwt.claim.sub" => SUBJECT,
            "request.jwt.claim.role" => WORD,
            _ => return Some(None),
        };
        Some(Some(Use { span: (at, end), source }))
    }

    /// The largest expression around a use that depends on nothing else.
    fn widest(&self, the_use: &Use) -> Span {
        let mut span = the_use.span;
        while let Some(wider) = self.wider(span) {
            span = wider;
        }
        span
    }

    fn wider(&self, (start, end): Span) -> Option<Span> {
        if self.is(end + 1, "::") {
            return Some((start, self.type_end(end + 2)?));
        }
        let before = start.checked_sub(1)?;
        if self.is_word(before, "SELECT") {
            return self.sub_select(before, end);
        }
        if !self.is(before, "(") {
            return None;
        }
        let outside = before.checked_sub(1).and_then(|at| self.tokens.get(at)).filter(|token| token.is_name());
        let (word, called) = (outside.map(Token::name), outside.is_some());
        if self.is(end + 1, ")") {
            return match word {
                Some(word) if OF_ONE.contains(&word) => Some((before - 1, end + 1)),
                Some(word) if !GROUPING.contains(&word) => None,
                _ => Some((before, end + 1)),
            };
        }
        // Something constant follows, and then the parenthesis ends.
        let listed = self.is(end + 1, ",") && matches!(word, Some("NULLIF" | "COALESCE"));
        let extracted = !called && self.tokens.get(end + 1).is_some_and(|token| EXTRACTING.contains(&token.text));
        let last = if listed || extracted { self.constant(end + 2)? } else { return None };
        self.is(last + 1, ")").then_some((if listed { before - 1 } else { before }, last + 1))
    }

    /// `( SELECT … AS name)`, if it is a value and not a set.
    fn sub_select(&self, select: usize, end: usize) -> Option<Span> {
        let open = select.checked_sub(1).filter(|at| self.is(*at, "("))?;
        let outside = open.checked_sub(1).and_then(|at| self.tokens.get(at)).filter(|token| token.is_name());
        if outside.is_some_and(|token| !GROUPING.contains(&token.name())) {
            return None;
        }
        let close = if self.is_word(end + 1, "AS") { end + 3 } else { end + 1 };
        self.is(close, ")").then_some((open, close))
    }

    /// Last token of a constant that begins at `at`.
    fn constant(&self, at: usize) -> Option<usize> {
        let token = self.tokens.get(at)?;
        let constant =
            matches!(token.kind, Kind::Literal | Kind::Number) || ["true", "false", "NULL"].contains(&token.text);
        let end = constant.then_some(at)?;
        if self.is(end + 1, "::") { self.type_end(end + 2) } else { Some(end) }
    }

    /// Last token of a type's name: `character varying(10)[]`. A name with a dot is somebody's own type.
    fn type_end(&self, at: usize) -> Option<usize> {
        let mut end = at;
        self.tokens.get(at).filter(|token| token.is_name())?;
        while self.tokens.get(end + 1).is_some_and(|token| TYPE_WORDS.contains(&token.text)) {
            end += 1;
        }
        if self.is(end + 1, "(") {
            end = (end + 2..self.tokens.len()).find(|at| self.is(*at, ")"))?;
            while self.tokens.get(end + 1).is_some_and(|token| TYPE_WORDS.contains(&token.text)) {
                end += 1;
            }
        }
        while self.is(end + 1, "[") && self.is(end + 2, "]") {
            end += 2;
        }
        (!self.is(end + 1, ".")).then_some(end)
    }

    /// The expression of a span, reading the identity's row instead of the setting.
    fn key(&self, span: Span, the_use: &Use) -> String {
        let ((start, end), (from, to)) = (self.bytes(span), self.bytes(the_use.span));
        format!("{}{}{}", &self.source[start..from], the_use.source, &self.source[to..end])
    }

    fn bytes(&self, (first, last): Span) -> (usize, usize) {
        (self.tokens[first].at, self.tokens[last].at + self.tokens[last].text.len())
    }

    fn is(&self, at: usize, symbol: &str) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == Kind::Symbol && token.text == symbol)
    }

    fn is_word(&self, at: usize, word: &str) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == Kind::Word && token.text == word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hoisted(expression: &str) -> Option<(String, Vec<String>)> {
        hoist(expression).map(|Hoisted { expression, keys }| (expression, keys))
    }

    fn one(expression: &str, rewritten: &str, key: &str) {
        assert_eq!(hoisted(expression), Some((rewritten.to_owned(), vec![key.to_owned()])), "{expression}");
    }

    #[test]
    fn r_rls_5_what_is_made_of_claims_alone_is_taken_out_whole() {
        let plain = "(owner_id = (((current_setting('request.jwt.claims'::text))::json ->> 'sub'::text))::uuid)";
        one(plain, "(owner_id = _aura_c._aura_k0)", "(((_aura_claims)::json ->> 'sub'::text))::uuid");
        one(
            "(owner_id = ( SELECT (((current_setting('request.jwt.claims'::text, true))::json ->> 'sub'::text))::uuid AS uuid))",
            "(owner_id = _aura_c._aura_k0)",
            "( SELECT (((_aura_claims)::json ->> 'sub'::text))::uuid AS uuid)",
        );
        one(
            "(is_public OR (owner = (NULLIF(current_setting('request.jwt.claim.sub'::text, true), ''::text))::uuid))",
            "(is_public OR (owner = _aura_c._aura_k0))",
            "(NULLIF(_aura_subject, ''::text))::uuid",
        );
        one(
            "(lower(name) = lower(((current_setting('Request.JWT.Claims'::text))::jsonb #>> '{a,b}'::text[])))",
            "(lower(name) = _aura_c._aura_k0)",
            "lower(((_aura_claims)::jsonb #>> '{a,b}'::text[]))",
        );
        one(
            "(tag = ANY (((current_setting('request.jwt.claims'::text))::jsonb -> 'tags'::text)))",
            "(tag = ANY (_aura_c._aura_k0))",
            "((_aura_claims)::jsonb -> 'tags'::text)",
        );
        one(
            "(kind = (current_setting('request.jwt.claim.role'::text))::character varying(10))",
            "(kind = _aura_c._aura_k0)",
            "(_aura_word)::character varying(10)",
        );
    }

    #[test]
    fn equal_expressions_share_a_column_and_constant_policies_have_none() {
        let claim = |name: &str| format!("((current_setting('request.jwt.claims'::text))::json ->> '{name}'::text)");
        let text = format!("((a = {}) OR (b = {}) OR (c = {}))", claim("x"), claim("y"), claim("x"));
        let (expression, keys) = hoisted(&text).expect("only claims");
        assert_eq!(expression, "((a = _aura_c._aura_k0) OR (b = _aura_c._aura_k1) OR (c = _aura_c._aura_k0))");
        assert_eq!(keys.len(), 2);
        assert_eq!(hoisted("(owner IS DISTINCT FROM 7)"), Some(("(owner IS DISTINCT FROM 7)".to_owned(), vec![])));
        assert_eq!(hoisted("true"), Some(("true".to_owned(), vec![])));
    }

    #[test]
    fn r_rls_5_what_might_read_the_claims_unseen_stays_as_it_is() {
        for text in [
            "(owner = shop.uid())",
            "(owner = auth.uid(id))",
            "(owner = auth.email())",
            "(id IN ( SELECT m.id FROM shop.members m))",
            "(current_setting(name) = 'x'::text)",
            "(current_setting('request.jwt.claims'::text, flag) = 'x'::text)",
            "(current_setting('request.jwt.claims'::text, \"true\") = 'x'::text)",
            "(current_setting(('request.jwt.'::text || 'claims'::text)) = 'x'::text)",
            "(query_to_xml('select 1'::text, true, false, ''::text) IS NULL)",
            "\"Current_Setting\"('request.jwt.claims'::text)",
            "shop.f(t.*)",
            "(t.* IS NOT NULL)",
            "(set_config('a.b'::text, name, true) = name)",
            "('unterminated",
        ] {
            assert_eq!(hoisted(text), None, "{text}");
        }
    }

    #[test]
    fn r_rls_5_known_functions_are_seen_through() {
        let uid = KNOWN[0].key;
        one("(owner = auth.uid())", "(owner = _aura_c._aura_k0)", uid);
        let wrapped = format!("( SELECT {uid} AS uid)");
        one("(owner = ( SELECT auth.uid() AS uid))", "(owner = _aura_c._aura_k0)", &wrapped);
        let org = format!("({} ->> 'org'::text)", KNOWN[2].key);
        one("(org = (auth.jwt() ->> 'org'::text))", "(org = _aura_c._aura_k0)", &org);
        let bootstrap = include_str!("admin/bootstrap.sql");
        for known in KNOWN {
            let made = bootstrap.split(&format!("create function {}()", known.name)).nth(1).expect(known.name);
            let body = made.split("$$").nth(1).expect(known.name);
            assert!(normal(body) == normal(known.sources[0]) && is_known(known.name, known.returns, body), "{body}");
            assert!(is_known(known.name, known.returns, &format!("\n\t{} ;\n", known.sources[1])), "{}", known.name);
        }
    }

    #[test]
    fn r_rls_5_what_only_looks_like_a_known_function_is_not_seen_through() {
        let Known { name, returns, sources: [source, _], .. } = &KNOWN[0];
        assert!(
            is_known(name, *returns, source) && !is_known(name, 25, source) && !is_known("auth.role", *returns, source)
        );
        for (of, with) in [
            ("''", "' '"),
            ("'sub'", "'s ub'"),
            ("coalesce(", "coalesce\u{a0}("),
            ("coalesce(", "coalesce\x0b("),
            ("->>", "->>--'\n"),
        ] {
            let text = source.replace(of, with);
            assert!(text != *source && !is_known(name, *returns, &text), "{text}");
        }
        assert!(
            !is_known(name, *returns, "select 'a11ce000-0000-4000-8000-000000000001'::uuid") && !is_known("", 0, "")
        );
    }

    #[test]
    fn r_rls_5_a_literal_or_a_name_that_looks_like_a_claim_is_none() {
        for text in [
            "(note = 'current_setting(''request.jwt.claims''::text)'::text)",
            r"(note = E'\\current_setting(''request.jwt.claims''::text)'::text)",
            "(\"current_setting('request.jwt.claims'::text)\" = 'x'::text)",
            "(current_setting('app.tenant'::text, true) = tenant)",
        ] {
            assert_eq!(hoisted(text), Some((text.to_owned(), vec![])), "{text}");
        }
    }
}
