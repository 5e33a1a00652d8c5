//! The SQL that judges images. They travel as text of the table's row type; nothing of ours has a name that a policy
//! could capture.

use aura_domain::{Image, Relation, Value, quote_ident};

use crate::{
    admin::JUDGE_IS_OURS,
    catalog::{Effective, TableCatalog},
    hoist::{CLAIMS, Hoisted, PREFIX, SUBJECT, WORD},
};

/// Opens the check's transaction: one snapshot for all of it, nothing can be written.
pub(super) const BEGIN: &str = "begin isolation level repeatable read, read only";
/// Ends it and takes away whatever the tenant's code left in the session (R-RLS-9).
pub(super) const ROLLBACK: &str = "rollback";
/// Must be a message of its own.
pub(super) const DISCARD: &str = "discard all";
/// Takes back settings that what was asked before left in this transaction.
pub(super) const RESET: &str = "reset all";
/// An identity of its own, when one raised an error (R-RLS-6).
pub(super) const SAVEPOINT: &str = "savepoint _aura";
/// Also takes back its settings.
pub(super) const ROLLBACK_TO: &str = "rollback to savepoint _aura";

/// Becomes an identity, before anything of the policy is planned: planning evaluates stable parts of it (R-RLS-5).
/// Parameters: role, claims, role word, `sub`, time limit, the table's oid. What only PostgREST sets has a harmless value,
/// so that policies that ask for it don't fail. The list is evaluated from left to right: the last column says whether
/// row security applies to the role (R-RLS-2: not with BYPASSRLS, nor to the owner without FORCE).
pub(super) const BECOME: &str = "select pg_catalog.set_config('role', $1, true), \
     pg_catalog.set_config('search_path', '', true), \
     pg_catalog.set_config('row_security', 'on', true), \
     pg_catalog.set_config('jit', 'off', true), \
     pg_catalog.set_config('statement_timeout', $5, true), \
     pg_catalog.set_config('request.jwt.claims', $2, true), \
     pg_catalog.set_config('request.jwt.claim.role', $3, true), \
     pg_catalog.set_config('request.jwt.claim.sub', $4, true), \
     pg_catalog.set_config('request.headers', '{}', true), \
     pg_catalog.set_config('request.cookies', '{}', true), \
     pg_catalog.set_config('request.method', 'GET', true), \
     pg_catalog.set_config('request.path', '', true), \
     pg_catalog.row_security_active($6)";
/// Column of [`BECOME`]'s answer that says whether row security applies.
pub(super) const ROW_SECURITY_ACTIVE: usize = 12;

/// Asks for the visible images of several identities, one after the other, by the function that bootstrap made: it does
/// for each what [`BECOME`] does. Parameters: see there. No rows: the function is somebody else's, and wasn't called.
pub(super) fn looped(table: &TableCatalog) -> String {
    let images = images(table, "$2");
    format!(
        "select _aura_r.who, _aura_r.seen from (select $1::pg_catalog.text as query where {JUDGE_IS_OURS}) as _aura_g, \
         lateral aura_source.judge(_aura_g.query, {images}, $3, $4, $5, $6, $7, $8, $9) as _aura_r"
    )
}

/// What [`looped`] runs per identity: ordinals (from 1) of the visible ones of `$1`, an array of the row type.
pub(super) fn query(table: &TableCatalog, using: &Effective) -> String {
    visible(table, using, "$1")
}

/// The same for one identity, of `$1`, a text array.
pub(super) fn alone(table: &TableCatalog, using: &Effective) -> String {
    visible(table, using, &images(table, "$1"))
}

/// The policy's text prints columns bare, and inside sub-selects qualified by the table's name: that is the alias. A
/// whole-row reference needs the row type, which `with ordinality` would change: so the ordinals are counted.
fn visible(table: &TableCatalog, using: &Effective, images: &str) -> String {
    let expression = using.expression.as_deref().unwrap_or("false");
    format!(
        "select array(select _aura_s._aura_n from (\
         select pg_catalog.row_number() over () as _aura_n, ({expression}) as _aura_ok \
         from pg_catalog.unnest({images}) as {alias}) as _aura_s where _aura_s._aura_ok)",
        alias = quote_ident(&table.relation.table),
    )
}

/// Asks for the visible images of many identities in one statement: rows of (ordinal of the identity, ordinals of its
/// images). Parameters: images, claims, `sub` claims, role word; and if only `some` pairs matter, the ordinals of their
/// identities and images. `None` if a name of the table is one of ours.
pub(super) fn joined(table: &TableCatalog, using: &Effective, hoisted: &Hoisted, some: bool) -> Option<String> {
    let name = &table.relation.table;
    let ours = |name: &str| name.starts_with(PREFIX);
    if ours(name) || table.columns.iter().any(|column| ours(&column.name)) {
        return None;
    }
    let alias = quote_ident(name);
    let columns = using.columns.iter().map(|n| format!(", {alias}.{}", quote_ident(&table.columns[*n].name)));
    let pairs = if some {
        format!(
            "rows from (pg_catalog.unnest($5::pg_catalog.int8[]), pg_catalog.unnest($6::pg_catalog.int8[])) \
             as _aura_p (_aura_who, _aura_which) \
             join _aura_c on _aura_c._aura_i operator(pg_catalog.=) _aura_p._aura_who \
             join {alias} on {alias}._aura_n operator(pg_catalog.=) _aura_p._aura_which"
        )
    } else {
        format!("_aura_c, {alias}")
    };
    let keys = hoisted.keys.iter().enumerate().map(|(n, key)| format!(", ({key}) as _aura_k{n}"));
    Some(format!(
        "with {alias} as materialized (select pg_catalog.row_number() over () as _aura_n{columns} \
         from pg_catalog.unnest({images}) as {alias}), \
         _aura_c as materialized (select _aura_i{keys} \
         from rows from (pg_catalog.unnest($2::pg_catalog.text[]), pg_catalog.unnest($3::pg_catalog.text[])) with ordinality \
         as _aura_j ({CLAIMS}, {SUBJECT}, _aura_i), (select $4::pg_catalog.text) as _aura_w ({WORD})) \
         select _aura_c._aura_i, pg_catalog.array_agg({alias}._aura_n) from {pairs} \
         where ({expression}) group by _aura_c._aura_i",
        columns = columns.collect::<String>(),
        keys = keys.collect::<String>(),
        images = images(table, "$1"),
        expression = hoisted.expression,
    ))
}

/// A text array as an array of the row type, which is read column by column: nothing locks the table, so where one was
/// dropped and another added meanwhile, values would be others'. The catalogue's rows are those of the transaction's
/// snapshot; a function that asks for a privilege knows of a dropped column, for which it is null. What raises an error
/// is asked again, of the columns as they are then, or denied.
fn images(table: &TableCatalog, texts: &str) -> String {
    let Relation { schema, table: name } = &table.relation;
    let columns: Vec<String> = table.columns.iter().map(|column| column.attnum.to_string()).collect();
    format!(
        "(case when exists (select from pg_catalog.unnest('{{{columns}}}'::pg_catalog.int2[]) as _aura_a (_aura_n) \
         where pg_catalog.has_column_privilege({oid}::pg_catalog.oid, _aura_a._aura_n, 'SELECT') is null) \
         then array['its columns have changed'] else {texts}::pg_catalog.text[] end)::{schema}.{name}[]",
        columns = columns.join(","),
        oid = table.oid,
        schema = schema.quoted(),
        name = name.quoted(),
    )
}

/// What of an image the policies read, as the text form of the table's row type: images that are equal in it have one
/// verdict. `None` when a column that the policies read is missing: then the image can't be judged (R-RLS-4). Nor without
/// a domain's value, whoever reads it: the domain may not allow null.
pub(super) fn row_text(image: &Image, table: &TableCatalog, using: &Effective) -> Option<String> {
    let mut text = String::from("(");
    for (n, column) in table.columns.iter().enumerate() {
        if n > 0 {
            text.push(',');
        }
        let needed = using.columns.contains(&n) || column.ty.oid != column.ty.base_oid;
        match image.get(&column.name) {
            Some(Value::Unchanged) | None if needed => return None,
            Some(Value::Text(value)) if needed => push_quoted(&mut text, value),
            _ => {}
        }
    }
    text.push(')');
    Some(text)
}

fn push_quoted(text: &mut String, value: &str) {
    text.push('"');
    for c in value.chars() {
        if matches!(c, '"' | '\\') {
            text.push(c);
        }
        text.push(c);
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_rls_5_the_function_becomes_an_identity_as_a_statement_does() {
        let settings = |text: &'static str| -> Vec<&str> {
            let calls = text.split("pg_catalog.set_config(").skip(1);
            calls.filter_map(|call| call.split('\'').nth(1)).collect()
        };
        let bootstrap = include_str!("../admin/bootstrap.sql");
        assert_eq!(settings(BECOME), settings(bootstrap));
        assert!(settings(BECOME).contains(&"request.jwt.claims"));
    }

    #[test]
    fn values_can_t_leave_their_field() {
        let mut text = String::new();
        push_quoted(&mut text, r#"a","b)\"#);
        assert_eq!(text, r#""a"",""b)\\""#);
    }
}
