//! Which claims a policy asks for, read off its text.

use std::collections::BTreeSet;

/// Functions of the bootstrap's `auth` schema, and the claims that they return.
const HELPERS: [(&str, &str); 3] = [("uid()", "sub"), ("role()", "role"), ("email()", "email")];
/// PostgREST's old settings, a claim each.
const OLD: &str = "request.jwt.claim.";
/// Settings and functions that return all claims.
const WHOLE: [&str; 2] = ["request.jwt.claims", "jwt()"];

/// The keys that the expression names. A function that reads claims inside isn't looked into.
pub(crate) fn mentioned(expression: &str) -> BTreeSet<String> {
    let helpers = HELPERS.iter().filter(|(call, _)| expression.contains(&format!("auth.{call}")));
    let mut keys: BTreeSet<String> = helpers.map(|(_, key)| (*key).to_owned()).collect();
    let old = expression.match_indices(OLD).filter_map(|(at, _)| expression[at + OLD.len()..].split('\'').next());
    keys.extend(old.map(str::to_owned));
    if WHOLE.iter().any(|whole| expression.contains(whole)) {
        let arrows = expression.split("->").skip(1).map(|rest| rest.trim_start_matches('>').trim_start());
        let quoted = arrows.filter_map(|rest| rest.strip_prefix('\'')?.split('\'').next());
        keys.extend(quoted.map(str::to_owned));
    }
    keys
}

#[cfg(test)]
mod tests {
    use super::mentioned;

    #[test]
    fn the_keys_of_every_way_to_ask_for_a_claim() {
        let keys = |expression: &str| mentioned(expression).into_iter().collect::<Vec<_>>();
        assert_eq!(keys("(owner = auth.uid())"), ["sub"]);
        assert_eq!(keys("(owner = ( SELECT auth.uid() AS uid))"), ["sub"]);
        let settings = "(((current_setting('request.jwt.claims'::text, true))::jsonb ->> 'org'::text) = (org)::text)";
        assert_eq!(keys(settings), ["org"]);
        assert_eq!(keys("((auth.jwt() -> 'app_metadata'::text) ->> 'team'::text) = team"), ["app_metadata", "team"]);
        assert_eq!(keys("(current_setting('request.jwt.claim.email'::text, true) = mail)"), ["email"]);
        assert_eq!(keys("((details ->> 'public'::text) = 'yes'::text)"), Vec::<String>::new());
    }
}
