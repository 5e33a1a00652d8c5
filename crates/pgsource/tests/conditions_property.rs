//! Every operator and type of filters against `SELECT … WHERE` on the same server: what is decided on text forms, what
//! PostgreSQL is asked, NULLs and nasty values included. Zero differences.

use std::{collections::BTreeSet, sync::Arc};

use anyhow::{Context, Result, ensure};
use aura_domain::{Cell, Image, Value, quote_literal};
use aura_pgsource::{
    RoleAccess, TableCatalog,
    conditions::{Answers, Compiled, DecidedBy, Truth, parse},
    visibility::{CompileError, Subscriber},
};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use tokio_postgres::SimpleQueryMessage;

use crate::tenant::{Tenants, relation};

const SETUP: &str = "
    create schema ext; grant usage on schema ext to public;
    create extension citext schema ext; create extension hstore schema ext; create extension ltree schema ext;
    create collation ext.ignoring_case (provider = icu, locale = 'und-u-ks-level2', deterministic = false);
    create type ext.mood as enum ('sad', 'ok', 'happy', 'Ecstatic');
    create type ext.pair as (a int, b text);
    create domain ext.even as int check (value % 2 = 0);
    create domain ext.short as varchar(5) collate \"C\" check (value <> 'no');
    create domain ext.mail as ext.citext;
    create type ext.floats as range (subtype = float8);";

/// SQL type of a column, and values that are stored in it and asked about.
const TYPES: &[(&str, &[&str])] = &[
    ("int2", &["-32768", "-1", "0", "7", "32767", "32768", " 7 ", "+7", "x", "1.0"]),
    ("int4", &["-2147483648", "0", "42", "2147483647", "2147483648", "007", "0x10", "1e3", ""]),
    ("int8", &["-9223372036854775808", "9007199254740993", "9007199254740992", "9223372036854775808", "-0"]),
    ("oid", &["0", "26", "4294967295", "-1", "x"]),
    ("bool", &["t", "false", "yes", "off", "1", "o", "TRUE"]),
    (
        "uuid",
        &[
            "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11",
            "{A0EEBC999C0B4EF8BB6D6BB9BD380A11}",
            "00000000-0000-0000-0000-000000000000",
            "x",
        ],
    ),
    (
        "text",
        &[
            "",
            "a",
            "A",
            "b",
            "B",
            "é",
            "e\u{301}",
            "a%",
            "a_c",
            "abc",
            "a\\c",
            "Z",
            "ß",
            " a",
            "a ",
            "null",
            "NULL",
            "x,y",
            "x\"y\\z",
            "\u{1f600}",
            "it's",
            "a\nb",
            "^a",
            "a.c",
            "(",
            "a+",
            "[[:alpha:]]+",
        ],
    ),
    ("text collate \"C\"", &["", "a", "A", "b", "é", "z", "Z", "~", "\u{ffff}", "\u{10000}", "a%", "_"]),
    ("text collate \"en-x-icu\"", &["", "a", "A", "b", "B", "é", "e\u{301}", "z", "Z", "-a", "a-", "a%", "_b"]),
    ("text collate ext.ignoring_case", &["", "a", "A", "b", "B", "é", "É", "z"]),
    ("varchar(4)", &["", "a", "abcd", "abcde", "ABCD", "a%", "é"]),
    ("varchar collate \"en-x-icu\"", &["", "a", "A", "b", "é"]),
    ("char(4)", &["", "a", "a ", "abcd", "abcde", "A", "a%", "a___"]),
    (
        "name",
        &[
            "",
            "a",
            "A",
            "abcdefghijabcdefghijabcdefghijabcdefghijabcdefghijabcdefghijabc",
            "abcdefghijabcdefghijabcdefghijabcdefghijabcdefghijabcdefghijabcdefghij",
            "a%",
        ],
    ),
    ("\"char\"", &["", "a", "b", "ab", "\\101"]),
    (
        "numeric",
        &[
            "0",
            "-0.00",
            "1.5",
            "1.50",
            "15e-1",
            "1e100",
            "-1e-50",
            "NaN",
            "Infinity",
            "-inf",
            "99999999999999999999.000000001",
            ".5",
            "1.",
            "1_000",
            "x",
            "",
        ],
    ),
    ("numeric(6,2)", &["1.5", "1.50", "1.499", "-9999.99", "0.005"]),
    (
        "float4",
        &["0", "-0", "0.1", "0.10000000149011612", "NaN", "Infinity", "-Infinity", "1e-45", "3.4e38", "1e39", "x"],
    ),
    (
        "float8",
        &["0", "-0", "0.1", "0.1000000000000000055", "NaN", "inf", "-inf", "5e-324", "1e308", "1e400", "16777217", "x"],
    ),
    (
        "timestamp",
        &[
            "2026-01-02 03:04:05",
            "2026-01-02 03:04:05.5",
            "2026-01-02T03:04:05.45",
            "infinity",
            "-infinity",
            "0044-03-15 BC",
            "0043-03-15 BC",
            "12345-01-01",
            "2026-01-02",
            "epoch",
            "x",
        ],
    ),
    (
        "timestamptz",
        &[
            "2026-01-02 03:04:05+00",
            "2026-01-02 04:04:05+01",
            "2026-01-02 03:04:05.000001",
            "infinity",
            "-infinity",
            "0044-03-15 BC",
            "294276-12-31 23:59:59.999999+00",
            "x",
        ],
    ),
    (
        "date",
        &[
            "2026-01-02",
            "Jan 2 2026",
            "infinity",
            "-infinity",
            "4713-01-01 BC",
            "5874897-12-31",
            "2026-02-30",
            "20260102",
        ],
    ),
    ("time", &["00:00", "23:59:59.999999", "24:00:00", "12:00:00.5", "12:00:00.45", "25:00"]),
    ("timetz", &["00:00+00", "01:00+01", "23:59:59-05", "00:00+02"]),
    ("interval", &["1 day", "24 hours", "1 mon", "30 days", "-1 day", "1:02:03.5", "x"]),
    ("bytea", &["\\x", "\\x00", "\\x0000", "\\xff", "\\xFF", "abc", "\\x0"]),
    ("json", &["{}", "1"]),
    ("jsonb", &["{}", "{\"a\": 1}", "{\"a\":1.0}", "[1, 2]", "null", "1", "\"x\"", "x"]),
    ("int4[]", &["{}", "{1,2}", "{1,NULL}", "{{1},{2}}", "[0:1]={1,2}", "x"]),
    ("text[] collate \"en-x-icu\"", &["{}", "{a}", "{A}", "{b,\"x,y\"}", "{NULL}"]),
    ("inet", &["10.0.0.1", "10.0.0.1/32", "10.0.0.0/8", "::1", "x"]),
    ("cidr", &["10.0.0.0/8", "10.0.0.1/8"]),
    ("macaddr", &["08:00:2b:01:02:03", "08002b010203"]),
    ("money", &["1.50", "-2", "$3.00", "x"]),
    ("bit(3)", &["101", "110", "1010", "2"]),
    ("varbit", &["", "1", "10", "010"]),
    ("int4range", &["[1,3)", "[1,2]", "empty", "(,5)", "x"]),
    ("ext.floats", &["[0,1.5)", "(0,1.5)", "empty"]),
    ("tsvector", &["a b", "'a':1", ""]),
    ("point", &["(0,0)", "1,2"]),
    ("xml", &["<a/>", "x"]),
    ("pg_lsn", &["0/0", "1/A", "FF/FF"]),
    ("regclass", &["pg_class", "1259", "no_such"]),
    ("ext.mood", &["sad", "ok", "happy", "Ecstatic", "none"]),
    ("ext.pair", &["(1,a)", "(1,)", "(,b)", "x"]),
    ("ext.even", &["-2", "0", "4", "3", "x"]),
    ("ext.short", &["", "a", "abcde", "no", "Z"]),
    ("ext.citext", &["a", "A", "ab", "AB", "é", "É", "a%", "^A"]),
    ("ext.mail", &["x@y", "X@Y", "z"]),
    ("ext.hstore", &["a=>1", "\"a\"=>\"1\", b=>NULL", ""]),
    ("ext.ltree", &["a.b", "a", "A.b"]),
];

/// SQL of the operators that have a value.
const OPERATORS: &[(&str, &str)] = &[
    ("eq", "="),
    ("neq", "<>"),
    ("lt", "<"),
    ("lte", "<="),
    ("gt", ">"),
    ("gte", ">="),
    ("like", "like"),
    ("ilike", "ilike"),
    ("match", "~"),
    ("imatch", "~*"),
    ("isdistinct", "is distinct from"),
];

/// A filter text and what it means in SQL.
type Case = (String, String);

struct Column {
    number: usize,
    images: Vec<Image>,
    table: Arc<TableCatalog>,
    access: Arc<RoleAccess>,
}

#[derive(Default)]
struct Tally {
    cases: usize,
    refused: usize,
    ours: usize,
    asked: usize,
}

#[tokio::test(flavor = "multi_thread")]
async fn r_rls_7_filters_have_exactly_postgresql_s_semantics() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants.superuser.batch_execute(SETUP).await?;
    let mut random = StdRng::seed_from_u64(7);
    let mut total = Tally::default();
    let mut differences = Vec::new();
    for (number, (ty, values)) in TYPES.iter().enumerate() {
        let mut values: Vec<String> = values.iter().map(|value| (*value).to_owned()).collect();
        values.extend((0..4).filter_map(|_| random_value(ty, &mut random)));
        let column = Column::make(&tenants, number, ty, &values).await.with_context(|| (*ty).to_owned())?;
        let cases = cases(ty, &values, &mut random);
        let tally = column.judge(&tenants, &cases, &mut differences).await.with_context(|| (*ty).to_owned())?;
        ensure!(tally.refused < cases.len(), "{ty}: nothing can be asked");
        total.cases += tally.cases;
        total.refused += tally.refused;
        total.ours += tally.ours;
        total.asked += tally.asked;
    }
    let Tally { cases, refused, ours, asked } = total;
    println!("{cases} (condition, value) cases; conditions: {ours} decided here, {asked} asked, {refused} refused");
    ensure!(
        differences.is_empty(),
        "{} differences:\n{}",
        differences.len(),
        differences[..differences.len().min(40)].join("\n")
    );
    ensure!(cases > 20_000 && ours > 1000 && asked > 1000 && refused > 100, "too few cases");
    Ok(())
}

impl Column {
    /// A table with the values that the type takes, and NULL; images as the log would show them.
    async fn make(tenants: &Tenants, number: usize, ty: &str, values: &[String]) -> Result<Self> {
        let name = format!("c{number}");
        let sql = format!(
            "create table shop.{name} (id int generated always as identity primary key, v {ty});
             grant select on shop.{name} to {{authenticated}}; insert into shop.{name} (v) values (null)"
        );
        tenants.run(&sql).await?;
        for value in values {
            let insert = format!("insert into shop.{name} (v) values ({})", quote_literal(value));
            let _values_that_the_type_refuses = tenants.sql.batch_execute(&insert).await;
        }
        let described = tenants.pool.describe(tenants.shop, &relation("shop", &name)?, "authenticated", &[]).await?;
        let (table, access) = described.context("no table")?;
        let type_oid = table.columns[1].ty.oid;
        let rows = tenants.sql.simple_query(&format!("select id, v from shop.{name} order by id")).await?;
        let cell = |name: &str, value: Option<&str>, type_oid| Cell {
            name: name.into(),
            type_oid,
            value: value.map_or(Value::Null, |text| Value::Text(text.into())),
        };
        let images = rows.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => {
                Some(Image(vec![cell("id", row.get(0), 23), cell("v", row.get(1), type_oid)]))
            }
            _ => None,
        });
        Ok(Self { number, images: images.collect(), table, access })
    }

    /// All cases in one batch, as an engine would; differences are described.
    async fn judge(&self, tenants: &Tenants, cases: &[Case], differences: &mut Vec<String>) -> Result<Tally> {
        let mut tally = Tally::default();
        let mut compiled: Vec<(&Case, Vec<Arc<Compiled>>)> = Vec::new();
        for case in cases {
            match self.compile(tenants, &case.0).await {
                Ok(conditions) => compiled.push((case, conditions)),
                Err(why) => {
                    tally.refused += 1;
                    // Only what the server refuses, too, or what is refused by the grammar's rules.
                    let ruled =
                        ["text-compatible", "boolean column", "back-reference", "LIKE pattern", "malformed array"];
                    let fails = self.rows(tenants, &case.1).await.is_err();
                    if !fails && !ruled.iter().any(|words| why.contains(words)) && !why.contains("check constraint") {
                        differences.push(format!("{}: {} refused ({why}), not by the server", self.number, case.0));
                    }
                }
            }
        }
        let mut answers = Answers::default();
        for (_, conditions) in &compiled {
            for image in &self.images {
                for condition in conditions {
                    let _open = condition.truth(image, &mut answers);
                }
            }
        }
        tenants.pool.decide(tenants.shop_tenant(), &mut answers).await?;
        for (case, conditions) in &compiled {
            let by = |by| conditions.iter().all(|condition| condition.decided_by() == by);
            tally.ours += usize::from(by(DecidedBy::Us));
            tally.asked += usize::from(by(DecidedBy::Postgres));
            tally.cases += self.images.len();
            let holds = |image: &&Image| conditions.iter().all(|it| it.truth(image, &mut answers) == Truth::True);
            let ours: BTreeSet<String> = self
                .images
                .iter()
                .filter({
                    let mut holds = holds;
                    move |image| holds(image)
                })
                .map(id)
                .collect();
            let theirs = self.rows(tenants, &case.1).await;
            if theirs.as_ref().ok() != Some(&ours) {
                differences.push(format!("{}: {} → {ours:?}, {} → {theirs:?}", self.number, case.0, case.1));
            }
        }
        Ok(tally)
    }

    async fn compile(&self, tenants: &Tenants, filter: &str) -> Result<Vec<Arc<Compiled>>, String> {
        let conditions = parse(filter).map_err(|error| error.to_string())?;
        let subscriber = Subscriber { tenant: tenants.shop_tenant(), role: "authenticated", access: &self.access };
        tenants
            .pool
            .compile(subscriber, &self.table, &conditions, &mut std::time::Duration::from_secs(1))
            .await
            .map_err(|error| match error {
                CompileError::Refused(why) => why,
                CompileError::Source(error) => panic!("{filter}: {error}"),
            })
    }

    /// The oracle.
    async fn rows(&self, tenants: &Tenants, condition: &str) -> Result<BTreeSet<String>> {
        let sql = format!("set search_path = pg_catalog, ext; select id from shop.c{} where {condition}", self.number);
        let rows = tenants.sql.simple_query(&sql).await?;
        Ok(rows
            .iter()
            .filter_map(|it| match it {
                SimpleQueryMessage::Row(row) => row.get(0).map(str::to_owned),
                _ => None,
            })
            .collect())
    }
}

fn id(image: &Image) -> String {
    match &image.0[0].value {
        Value::Text(text) => text.to_string(),
        other => panic!("{other:?}"),
    }
}

/// A value is cast to the column's type (supabase-wire.md §3.6); of these types PostgreSQL would cast a bare literal to
/// the type that lends them its operators.
fn literal(ty: &str, value: &str) -> String {
    let cast = if ["cidr", "regclass", "ext.pair"].contains(&ty) { format!("::{ty}") } else { String::new() };
    format!("{}{cast}", quote_literal(value))
}

fn cases(ty: &str, values: &[String], random: &mut StdRng) -> Vec<Case> {
    let mut cases = Vec::new();
    for not in [false, true] {
        let (word, sql_not) = if not { ("not.", "not") } else { ("", "") };
        for (operator, sql) in OPERATORS {
            for value in values {
                cases.push((
                    format!("v={word}{operator}.{}", quoted(value)),
                    format!("{sql_not} (v {sql} {})", literal(ty, value)),
                ));
            }
        }
        for words in ["null", "true", "false", "unknown"] {
            cases.push((format!("v={word}is.{words}"), format!("{sql_not} (v is {words})")));
        }
        for size in [0, 1, 3, 3] {
            let some: Vec<&String> = (0..size).map(|_| &values[random.random_range(0..values.len())]).collect();
            cases.push(list(ty, word, sql_not, &some, size == 3 && random.random_range(0..2) == 0));
        }
    }
    cases
}

fn list(ty: &str, word: &str, sql_not: &str, some: &[&String], null: bool) -> Case {
    let mut texts: Vec<String> = some.iter().map(|value| quoted(value)).collect();
    let mut sql: Vec<String> = some.iter().map(|value| literal(ty, value)).collect();
    if null {
        texts.push("null".to_owned());
        sql.push("null".to_owned());
    }
    let sql = if sql.is_empty() && ty.contains("[]") {
        // There is no type for an array of arrays.
        "false".to_owned()
    } else if sql.is_empty() {
        "v = any ('{}')".to_owned()
    } else {
        format!("v in ({})", sql.join(","))
    };
    (format!("v={word}in.({})", texts.join(",")), format!("{sql_not} ({sql})"))
}

fn quoted(value: &str) -> String {
    format!("\"{}\"", value.replace('\\', "\\\\").replace('"', "\\\""))
}

fn random_value(ty: &str, random: &mut StdRng) -> Option<String> {
    let letters = ['a', 'A', 'b', 'é', 'ß', '%', '_', '\\', ' ', '.', '*', 'z', '0', '-', '\u{1f600}'];
    let digits = |random: &mut StdRng, most: usize| {
        (0..random.random_range(1..=most)).map(|_| char::from(b'0' + random.random_range(0..10_u8))).collect::<String>()
    };
    Some(match ty {
        "int2" | "int4" | "int8" | "oid" => digits(random, 6),
        "numeric" | "float4" | "float8" => {
            let sign = if random.random_range(0..2) == 0 { "-" } else { "" };
            format!("{sign}{}.{}", digits(random, 20), digits(random, 20))
        }
        "timestamp" | "timestamptz" => format!(
            "{:04}-{:02}-{:02} {:02}:00:00.{}",
            random.random_range(1..3000),
            random.random_range(1..13),
            random.random_range(1..29),
            random.random_range(0..24),
            digits(random, 6)
        ),
        ty if ty.starts_with("text")
            || ty.starts_with("varchar")
            || ty.starts_with("char")
            || ty.ends_with("citext") =>
        {
            (0..random.random_range(0..5)).map(|_| letters[random.random_range(0..letters.len())]).collect()
        }
        _ => return None,
    })
}
