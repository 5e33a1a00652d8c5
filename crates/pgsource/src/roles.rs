//! Names of the roles that each project owns in its source (R-RLS-8, R-RLS-9). All derive from the project's id, so that
//! no word of a token ever reaches the database as a role name.

use aura_domain::{ProjectId, SqlName};

/// What every client has before it signs in.
pub const ANON: &str = "anon";
/// End users with a token of their own.
pub const AUTHENTICATED: &str = "authenticated";
/// The project's back end. Nobody ever becomes it in the database: it is only an argument of `has_*_privilege`.
pub const SERVICE_ROLE: &str = "service_role";

/// The role words that every project has.
pub const BUILT_IN: [&str; 3] = [ANON, AUTHENTICATED, SERVICE_ROLE];

/// Words that would name another of the project's own roles.
const RESERVED: &str = "visibility";

/// The database role for a token's role word: `p_<project id>_<word>`. `None` if the word can't be one: other than
/// `[a-z0-9_]{1,24}` (39 bytes of prefix, 63 in all), or reserved.
pub fn project_role(project: ProjectId, word: &str) -> Option<SqlName> {
    let legal = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
    if word.is_empty() || word == RESERVED || !word.bytes().all(legal) {
        return None;
    }
    SqlName::new(format!("p_{project}_{word}")).ok()
}

/// The login under which the project's own code runs, and nothing else (R-RLS-9): `p_<project id>_visibility`.
pub fn visibility_login(project: ProjectId) -> String {
    format!("p_{project}_{RESERVED}")
}

/// The allow-list of R-RLS-8: the database role for a token's word, if the project knows that word.
pub(crate) fn allowed_role(project: ProjectId, word: &str, extra: &[String]) -> Option<SqlName> {
    let known = BUILT_IN.contains(&word) || extra.iter().any(|role| role == word);
    if known { project_role(project, word) } else { None }
}

/// Every database role that the project's tokens may map to.
pub(crate) fn all_roles(project: ProjectId, extra: &[String]) -> Vec<SqlName> {
    let words = BUILT_IN.iter().copied().chain(extra.iter().map(String::as_str));
    words.filter_map(|word| project_role(project, word)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn project() -> ProjectId {
        "6f9619ff-8b86-4d01-b42d-00cf4fc964ff".parse().expect("a uuid")
    }

    #[test]
    fn r_rls_8_only_words_of_the_allow_list_map_to_a_role() {
        let extra = ["editor".to_owned()];
        let role = |word| allowed_role(project(), word, &extra).map(|name| name.to_string());
        assert_eq!(role("anon").as_deref(), Some("p_6f9619ff-8b86-4d01-b42d-00cf4fc964ff_anon"));
        assert_eq!(role("editor").as_deref(), Some("p_6f9619ff-8b86-4d01-b42d-00cf4fc964ff_editor"));
        for word in ["postgres", "", "visibility", "Anon", "anon ", "supabase_admin", "p_x_anon"] {
            assert_eq!(role(word), None, "{word:?}");
        }
    }

    #[test]
    fn role_names_fit_an_identifier() {
        assert!(visibility_login(project()).len() <= SqlName::MAX_BYTES);
        assert!(project_role(project(), &"x".repeat(24)).is_some());
        assert_eq!(project_role(project(), &"x".repeat(25)), None);
        assert_eq!(project_role(project(), "visibility"), None, "an extra role can't be the login");
    }
}
