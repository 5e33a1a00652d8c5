//! Our JSON against `to_jsonb` of the typed value (R-DEC-2).

use anyhow::{Context, Result};
use aura_domain::SqlName;
use aura_pgsource::{TypeInfo, encode_value};
use proptest::{
    prelude::{Strategy, any, prop},
    strategy::ValueTree,
    test_runner::TestRunner,
};
use std::sync::Arc;

use crate::tenant::{Tenants, relation};

/// (type, text forms)
const SAMPLES: &[(&str, &[&str])] = &[
    ("bool", &["t", "f"]),
    ("int2", &["-32768", "0"]),
    ("int8", &["9223372036854775807", "-9007199254740993"]),
    ("float4", &["1.5", "-0", "1e30", "NaN", "Infinity", "1e-30"]),
    ("float8", &["0.1", "1e300", "-Infinity", "123456789.123456789"]),
    ("numeric", &["1.10000", "-0.00", "1e100", "NaN", "99999999999999999999999.000000001"]),
    ("numeric(10,2)", &["1.1"]),
    ("text", &["", "a\"b\\c\n\té🦀", "null", "{}"]),
    ("char(5)", &["ab"]),
    ("varchar(3)", &["abc"]),
    ("\"char\"", &["x"]),
    ("name", &["n"]),
    ("json", &["{\"a\":[1,null,\"x\"]}", "null", "\"s\"", "1.50"]),
    ("jsonb", &["{\"b\":1,\"a\":{\"c\":[]}}", "[]", "12345678901234567890.10"]),
    ("date", &["2024-02-29", "infinity", "0044-03-15 BC"]),
    ("time", &["01:02:03.4"]),
    ("timetz", &["01:02:03+05:30"]),
    ("timestamp", &["2024-02-29 01:02:03.4", "-infinity", "0044-03-15 01:02:03 BC", "20240-01-01 00:00:00"]),
    (
        "timestamptz",
        &["2024-02-29 01:02:03.4+02", "infinity", "0044-03-15 01:02:03+00 BC", "1900-01-01 00:00:00-03:17"],
    ),
    ("interval", &["1 year 2 days 03:04:05", "-1 day"]),
    ("uuid", &["a11ce000-0000-4000-8000-000000000001"]),
    ("inet", &["10.0.0.1/8", "::1"]),
    ("cidr", &["10.0.0.0/8"]),
    ("macaddr", &["08:00:2b:01:02:03"]),
    ("bit(3)", &["101"]),
    ("varbit", &["10"]),
    ("money", &["-12.34"]),
    ("point", &["(1,2)"]),
    ("box", &["(1,1),(0,0)"]),
    ("box[]", &["{(1,1),(0,0);(3,3),(2,2)}"]),
    ("int4range", &["[1,5)"]),
    ("int4multirange", &["{[1,5),[7,9)}"]),
    ("tsvector", &["'a':1 'b'"]),
    ("xml", &["<a b=\"c\"/>"]),
    ("oid", &["42"]),
    ("regclass", &["pg_class"]),
    ("int2vector", &["1 2 3", ""]),
    ("oidvector", &["1 2"]),
    ("int4[]", &["{}", "{1,NULL,3}", "{{1,2},{3,4}}", "[2:3]={7,8}", "{{{1}},{{2}}}"]),
    ("text[]", &["{a,\"b,c\",NULL,\"NULL\",\"q\\\"\\\\\",\"\",\"{x}\",\" s \"}"]),
    ("bool[]", &["{t,f,NULL}"]),
    ("jsonb[]", &["{\"{\\\"a\\\": [1]}\",\"null\",NULL}"]),
    ("timestamptz[]", &["{\"2024-02-29 01:02:03+00\",infinity}"]),
    ("bytea[]", &["{\"\\\\xdeadbeef\"}"]),
    ("numeric[]", &["{1.10,NaN}"]),
    ("shop.mood", &["so \"so\"", "ok"]),
    ("shop.mood[]", &["{ok,\"so \\\"so\\\"\"}"]),
    ("shop.positive", &["7"]),
    ("shop.nested", &["{1,2}"]),
    ("shop.positive[]", &["{1,NULL}"]),
    ("shop.pair", &["(1,\"a \"\"b\"\" \\\\ (c),\",\"{1,NULL}\")", "(,,)", "(7,\"\",)"]),
    ("shop.outer", &["(\"(1,\"\"x y\"\",\"\"{2}\"\")\",\"2024-01-02 03:04:05+00\")"]),
    ("shop.pair[]", &["{\"(1,x,)\",NULL}"]),
    ("shop.hstore", &["\"a\"=>\"1\", \"b\"=>NULL, \"c\\\"\"=>\"\\\\\"", ""]),
];

#[tokio::test]
async fn r_dec_2_every_type_reads_as_to_jsonb_shows_it() -> Result<()> {
    let tenants = Tenants::start().await?;
    tenants
        .run(
            "create type shop.mood as enum ('ok', 'so \"so\"');
             create domain shop.positive as int check (value > 0); create domain shop.nested as shop.positive[];
             create type shop.pair as (n shop.positive, \"a \"\"name\" text, gone text, l int[]);
             alter type shop.pair drop attribute gone;
             create type shop.outer as (p shop.pair, t timestamptz)",
        )
        .await?;
    tenants.superuser.batch_execute("create extension hstore schema shop").await.ok();
    let hstore = tenants.superuser.query("select from pg_extension where extname = 'hstore'", &[]).await?.len() == 1;
    for (ty, texts) in SAMPLES.iter().filter(|(ty, _)| hstore || *ty != "shop.hstore") {
        let info = type_of(&tenants, ty).await?;
        for text in *texts {
            compare(&tenants, ty, &info, text).await?;
        }
    }
    Ok(())
}

#[tokio::test]
async fn bytea_has_no_prefix_as_in_the_original() -> Result<()> {
    let tenants = Tenants::start().await?;
    let info = type_of(&tenants, "bytea").await?;
    let mut out = String::new();
    encode_value(&mut out, "\\xdeadbeef", &info);
    assert_eq!(out, "\"deadbeef\"");
    Ok(())
}

#[tokio::test]
async fn r_dec_2_random_values_read_as_to_jsonb_shows_them() -> Result<()> {
    let tenants = Tenants::start().await?;
    let mut runner = TestRunner::deterministic();
    let text = "[^\\x00]{0,12}";
    let moments = any::<i32>().prop_map(|seconds| format!("{seconds} seconds"));
    let strategies: Vec<(&str, &str, prop::strategy::BoxedStrategy<String>)> = vec![
        ("int8", "$1::text::int8", any::<i64>().prop_map(|n| n.to_string()).boxed()),
        ("float8", "$1::text::float8", any::<f64>().prop_map(|n| format!("{n:e}")).boxed()),
        ("float4", "$1::text::float4", any::<f32>().prop_map(|n| format!("{n:e}")).boxed()),
        ("numeric", "$1::text::numeric", "-?[0-9]{1,40}(\\.[0-9]{1,40})?".boxed()),
        ("text", "$1::text", text.boxed()),
        ("text[]", "string_to_array($1::text, 'a')", text.boxed()),
        ("text[]", "array[array[$1::text, null], array['x', $1 || '\"']]", text.boxed()),
        ("json", "to_json($1::text)", text.boxed()),
        ("jsonb", "jsonb_build_object($1::text, $1::text)", text.boxed()),
        ("jsonb[]", "array[to_jsonb($1::text)]", text.boxed()),
        ("timestamp", "timestamp '2000-01-01' + $1::text::interval * 30", moments.clone().boxed()),
        ("timestamptz", "timestamptz '2000-01-01' + $1::text::interval * 0.001", moments.clone().boxed()),
        ("timestamptz[]", "array[timestamptz '2000-01-01' + $1::text::interval]", moments.clone().boxed()),
        ("interval", "$1::text::interval", moments.boxed()),
    ];
    for (ty, sql, strategy) in strategies {
        let info = type_of(&tenants, ty).await?;
        for _ in 0..100 {
            let input = strategy.new_tree(&mut runner).map_err(|reason| anyhow::anyhow!("{reason}"))?.current();
            let row =
                tenants.sql.query_one(&format!("select format('%s', {sql}), to_jsonb({sql})::text"), &[&input]).await;
            let row = row.with_context(|| format!("{sql} of {input:?}"))?;
            agree(ty, &info, row.get(0), row.get(1));
        }
    }
    Ok(())
}

async fn compare(tenants: &Tenants, ty: &str, info: &TypeInfo, text: &str) -> Result<()> {
    // format() takes a type's output function, as the log does; a cast to text may be another.
    let sql = format!("select format('%s', $1::text::{ty}), to_jsonb($1::text::{ty})::text");
    let row = tenants.sql.query_one(&sql, &[&text]).await.with_context(|| format!("{ty} {text:?}"))?;
    agree(ty, info, row.get(0), row.get(1));
    Ok(())
}

/// Numbers by their digits, or by value where one of both has an exponent; the rest as JSON.
fn agree(ty: &str, info: &TypeInfo, text: &str, expected: &str) {
    let mut out = String::new();
    encode_value(&mut out, text, info);
    if out == expected {
        return;
    }
    // Read by the standard library: serde_json may be off by one in the last place.
    if let (Ok(ours), Ok(theirs)) = (out.parse::<f64>(), expected.parse::<f64>()) {
        return assert_eq!(ours, theirs, "{ty} {text:?}");
    }
    let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap_or_else(|_| panic!("{text}"));
    assert_eq!(json(&out), json(expected), "{ty} {text:?}");
}

/// The type as the catalogue statement describes a column of it.
async fn type_of(tenants: &Tenants, ty: &str) -> Result<Arc<TypeInfo>> {
    tenants.run(&format!("drop table if exists shop.typed; create table shop.typed (c {ty})")).await?;
    let at = relation("shop", "typed")?;
    let (table, _) = tenants.pool.describe(tenants.shop, &at, "anon", &[]).await?.context("a table")?;
    let name = SqlName::new("c")?;
    Ok(Arc::clone(&table.columns[table.column(&name).context("a column")?].ty))
}
