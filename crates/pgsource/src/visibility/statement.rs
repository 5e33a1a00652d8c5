//! The SQL that judges images. The images travel once per identity, as the text form of the table's row type; nothing of
//! ours has a name that a policy could capture.

use aura_domain::{Image, Relation, Value, quote_ident};

use crate::catalog::{Effective, TableCatalog};

/// Opens the check's transaction: one snapshot for all of it, nothing can be written.
pub(super) const BEGIN: &str = "begin isolation level repeatable read, read only";
/// Ends it and takes away whatever the tenant's code left in the session (R-RLS-9).
pub(super) const ROLLBACK: &str = "rollback";
/// Must be a message of its own.
pub(super) const DISCARD: &str = "discard all";
/// Takes back settings that the identity before left in this transaction.
pub(super) const RESET: &str = "reset all";
/// An identity of its own, when one raised an error (R-RLS-6).
pub(super) const SAVEPOINT: &str = "savepoint _aura";
/// Also takes back its settings.
pub(super) const ROLLBACK_TO: &str = "rollback to savepoint _aura";

/// Becomes an identity, before anything of the policy is planned: planning evaluates stable parts of it (R-RLS-5).
/// Parameters: role, claims, role word, `sub`, time limit. What only PostgREST sets has a harmless value, so that
/// policies that ask for it don't fail. `set_config` is evaluated from left to right.
pub(super) const BECOME: &str = "select pg_catalog.set_config('role', $1, true), \
     pg_catalog.set_config('search_path', '', true), \
     pg_catalog.set_config('row_security', 'on', true), \
     pg_catalog.set_config('statement_timeout', $5, true), \
     pg_catalog.set_config('request.jwt.claims', $2, true), \
     pg_catalog.set_config('request.jwt.claim.role', $3, true), \
     pg_catalog.set_config('request.jwt.claim.sub', $4, true), \
     pg_catalog.set_config('request.headers', '{}', true), \
     pg_catalog.set_config('request.cookies', '{}', true), \
     pg_catalog.set_config('request.method', 'GET', true), \
     pg_catalog.set_config('request.path', '', true)";

/// Asks for the ordinals (from 1) of the visible images of `$1`, a text array; null when row security doesn't apply to
/// the role (BYPASSRLS, owner without FORCE), so that it sees all (R-RLS-2).
///
/// The policy's text prints columns bare, and inside sub-selects qualified by the table's name: that is the alias. A
/// whole-row reference needs the row type, so each image is cast and unnested by itself.
pub(super) fn verdicts(table: &TableCatalog, using: &Effective) -> String {
    let Relation { schema, table: name } = &table.relation;
    let expression = using.expression.as_deref().unwrap_or("false");
    format!(
        "select case when pg_catalog.row_security_active({oid}::pg_catalog.oid) then array(\
         select _aura_o._aura_n from pg_catalog.unnest($1::pg_catalog.text[]) with ordinality as _aura_o (_aura_i, _aura_n) \
         where exists (select 1 from pg_catalog.unnest(array[_aura_o._aura_i::{row}]) as {alias} \
         where ({expression}))) end",
        oid = table.oid,
        row = format_args!("{}.{}", schema.quoted(), name.quoted()),
        alias = quote_ident(name),
    )
}

/// The image as the text form of the table's row type. `None` when a column that the policies read is missing: then it
/// can't be judged (R-RLS-4). Other missing ones are null.
pub(super) fn row_text(image: &Image, table: &TableCatalog, using: &Effective) -> Option<String> {
    let mut text = String::from("(");
    for (n, column) in table.columns.iter().enumerate() {
        if n > 0 {
            text.push(',');
        }
        match image.get(&column.name) {
            Some(Value::Text(value)) => push_quoted(&mut text, value),
            Some(Value::Null) => {}
            Some(Value::Unchanged) | None if using.columns.contains(&n) => return None,
            Some(Value::Unchanged) | None => {}
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
    fn values_can_t_leave_their_field() {
        let mut text = String::new();
        push_quoted(&mut text, r#"a","b)\"#);
        assert_eq!(text, r#""a"",""b)\\""#);
    }
}
