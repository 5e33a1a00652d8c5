//! What policies said, in words.

use aura_pgsource::visibility::{CheckOutcome, Identity, IdentityErrorKind, PolicyVerdict, PolicyWord, Verdict};
use serde_json::{Value, json};

use super::claims;

/// A policy and what it said.
pub(super) fn policy(verdict: &PolicyVerdict) -> Value {
    let mut shown = json!({"name": verdict.name, "permissive": verdict.permissive, "command": verdict.command,
        "roles": verdict.roles, "expression": verdict.expression, "passed": verdict.said.passes(),
        "claims": claims::mentioned(&verdict.expression)});
    match &verdict.said {
        PolicyWord::Yes | PolicyWord::No => {}
        PolicyWord::Null => shown["result"] = json!("null"),
        PolicyWord::Raised(code, message) => {
            shown["error"] = json!({"sqlstate": code.code(), "message": message});
        }
        PolicyWord::TimedOut => shown["error"] = json!({"sqlstate": "57014", "message": "it took longer than 2 s"}),
        PolicyWord::Missing(columns) => shown["missing_columns"] = json!(columns),
        PolicyWord::NotAsked => shown["passed"] = Value::Null,
    }
    shown
}

/// Whether the deciding image is visible, the code of what went wrong, and a sentence.
pub(super) fn judged(
    outcome: &CheckOutcome,
    said: &[PolicyVerdict],
    identity: &Identity,
) -> (bool, Option<&'static str>, String) {
    if !outcome.oid_matches {
        let message = "Another table stands under the name than the one that was registered.";
        return (false, Some("table_replaced"), message.to_owned());
    }
    let visible = match outcome.verdicts.first() {
        Some(Verdict::Decided { visible, .. }) => visible.first().copied().unwrap_or(false),
        Some(Verdict::Error(kind)) => {
            let (code, message) = error(kind);
            return (false, Some(code), message);
        }
        None => false,
    };
    if !outcome.row_security {
        return (visible, None, "Row security is off: whoever may read the table sees every row.".to_owned());
    }
    if visible {
        let by: Vec<_> = said.iter().filter(|policy| policy.said.passes()).map(|policy| &*policy.name).collect();
        let message = match by.as_slice() {
            [] => format!("Row security does not bind {}.", identity.role),
            names => format!("Row security shows the row: {}.", names.join(", ")),
        };
        return (true, None, message);
    }
    if said.iter().any(|policy| matches!(policy.said, PolicyWord::Missing(_))) {
        let message = "A policy reads a column that the row's image lacks, so it can't be judged.";
        return (false, Some("not_judgeable"), message.to_owned());
    }
    let message = match said.iter().find(|policy| !policy.permissive && !policy.said.passes()) {
        _ if !said.iter().any(|policy| policy.permissive) => "No permissive policy applies to the role.".to_owned(),
        _ if !said.iter().any(|policy| policy.permissive && policy.said.passes()) => {
            "No permissive policy lets the row through.".to_owned()
        }
        Some(policy) => format!("The restrictive policy {:?} does not let the row through.", policy.name),
        None => "Row security hides the row.".to_owned(),
    };
    (false, None, message)
}

/// Word and sentence of an error; the same in the log.
pub(crate) fn error(kind: &IdentityErrorKind) -> (&'static str, String) {
    let (code, message) = match kind {
        IdentityErrorKind::UnknownRole => ("unknown_role", "The role is none of the project's."),
        IdentityErrorKind::TableReplaced => ("table_replaced", "Another table stands under the name."),
        IdentityErrorKind::NotJudgeable => {
            ("not_judgeable", "A policy reads a system column, or writes: it can't be judged on a row of the log.")
        }
        IdentityErrorKind::Policy(state) => {
            return ("policy_raised", format!("A policy raised an error (SQLSTATE {}).", state.code()));
        }
        IdentityErrorKind::TimedOut => ("timed_out", "The policies took longer than 2 s."),
        IdentityErrorKind::CircuitOpen => {
            ("circuit_open", "Its policies took too long again and again, so they are not asked for a while.")
        }
        IdentityErrorKind::ConnectionLost => ("connection_lost", "The policies ended the connection."),
        IdentityErrorKind::LoginFailed => ("login_failed", "The project's visibility login can't connect."),
    };
    (code, message.to_owned())
}
