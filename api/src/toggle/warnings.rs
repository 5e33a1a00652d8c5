//! What to look at about a table (R-REG-7); docs/warnings.md says what each means.

use aura_pgsource::admin::{TableInfo, Unjudgeable, UnjudgeableCause};

use super::view::Warning;

/// Above so many columns, FULL writes noticeably more log than the key would.
const WIDE_COLUMNS: i64 = 50;
/// And above so many bytes of an average row, what is stored out of line included.
const WIDE_ROW: i64 = 1000;

/// All that applies, what decides who sees anything first.
pub(super) fn of(info: &TableInfo) -> Vec<Warning> {
    let found = row_security(info).into_iter().chain(rest(info));
    found.chain(info.unjudgeable.iter().map(not_judgeable)).collect()
}

/// At most one: each is the reason of those behind it.
fn row_security(info: &TableInfo) -> Option<Warning> {
    let (code, message) = if !info.rls_enabled {
        ("rls_disabled", "Row security is off: everyone with the anon key sees every row.")
    } else if info.policies == 0 {
        ("rls_without_policy", "Row security is on and there is no policy: nobody sees a row.")
    } else if info.permissive == 0 {
        ("rls_only_restrictive", "All policies are restrictive, and none is permissive: nobody sees a row.")
    } else if !info.policies_apply {
        ("policies_for_other_roles", "No permissive policy is for a role of the project: nobody sees a row.")
    } else {
        return None;
    };
    Some(warning(code, message))
}

fn rest(info: &TableInfo) -> impl Iterator<Item = Warning> {
    let unreadable = "No role but service_role may read the table: grant SELECT to aura_anon or aura_authenticated.";
    let checks = [
        (!info.readable, "no_select_privilege", unreadable),
        (!info.has_primary_key, "no_primary_key", "Without a primary key clients can't tell rows apart."),
    ];
    let found = checks.into_iter().filter(|(applies, ..)| *applies);
    found.map(|(_, code, message)| warning(code, message)).chain(amplification(info))
}

fn amplification(info: &TableInfo) -> Option<Warning> {
    let wide_row = info.row_bytes.filter(|bytes| *bytes > WIDE_ROW);
    if info.columns <= WIDE_COLUMNS && wide_row.is_none() {
        return None;
    }
    let amount = info.row_bytes.map_or_else(String::new, |bytes| format!(", some {bytes} bytes more each time"));
    let message =
        format!("The table is wide: with REPLICA IDENTITY FULL each UPDATE and DELETE logs the whole old row{amount}.");
    Some(warning("write_amplification", message))
}

/// R-RLS-4: what it decides, nobody gets.
fn not_judgeable(policy: &Unjudgeable) -> Warning {
    let why = match policy.cause {
        UnjudgeableCause::SystemColumn => "reads a system column, which a row of the log doesn't have",
        UnjudgeableCause::Writes => "may write, and policies are judged read-only",
        UnjudgeableCause::GeneratedColumn => {
            "reads a generated column, which pgoutput doesn't send before PostgreSQL 18"
        }
    };
    let message = format!("The policy {:?} {why}: rows that it decides are not delivered.", policy.policy);
    warning("policy_not_judgeable", message)
}

fn warning(code: &'static str, message: impl Into<String>) -> Warning {
    Warning { code, message: message.into() }
}
