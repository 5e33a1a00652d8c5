//! The closed set of error codes.

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $text:literal, $status:literal, $retryable:literal, $title:literal;)*) => {
        /// What went wrong, for programs. Each code has a page `docs/errors/<code>.md`; a code is never renamed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize)]
        pub enum Code {
            $($(#[$doc])* #[serde(rename = $text)] $name,)*
        }

        impl Code {
            /// Every code.
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The word on the wire.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }

            /// HTTP status that goes with it.
            pub const fn status(self) -> u16 {
                match self { $(Self::$name => $status,)* }
            }

            /// Whether the same request may succeed later without any change.
            pub const fn retryable(self) -> bool {
                match self { $(Self::$name => $retryable,)* }
            }

            /// Short sentence, the same for every occurrence.
            pub const fn title(self) -> &'static str {
                match self { $(Self::$name => $title,)* }
            }
        }
    };
}

codes! {
    /// Syntax of path, query, header or body.
    MalformedRequest = "malformed_request", 400, false, "The request can't be read";
    /// No `apikey` and no `Authorization: Bearer`.
    MissingCredentials = "missing_credentials", 401, false, "A key is required";
    /// Not a token, a bad signature, an algorithm that isn't the key's, claims missing.
    InvalidToken = "invalid_token", 401, false, "The token is not valid";
    /// `exp` has passed.
    TokenExpired = "token_expired", 401, false, "The token has expired";
    /// The key was revoked.
    KeyRevoked = "key_revoked", 401, false, "The key has been revoked";
    /// A valid token whose role is too low.
    InsufficientRole = "insufficient_role", 403, false, "The role of this token may not do that";
    /// The page's origin isn't among those of `AURA_ALLOWED_ORIGINS`.
    OriginNotAllowed = "origin_not_allowed", 403, false, "Pages of this origin may not connect";
    /// A Studio session's cookie came without its `csrf_token`, or from another site.
    CsrfFailed = "csrf_failed", 403, false, "The request does not come from the session's own page";
    /// No such route.
    RouteNotFound = "route_not_found", 404, false, "There is nothing here";
    /// Unknown project, or one that the key doesn't belong to: the two are indistinguishable.
    ProjectNotFound = "project_not_found", 404, false, "No such project";
    /// The schema is none of the project's.
    SchemaNotFound = "schema_not_found", 404, false, "No such schema in this project";
    /// No relation of that name.
    TableNotFound = "table_not_found", 404, false, "No such table";
    /// Unknown source.
    SourceNotFound = "source_not_found", 404, false, "No such source";
    /// The path exists, the verb doesn't.
    MethodNotAllowed = "method_not_allowed", 405, false, "This path does not take that method";
    /// The body didn't arrive in 10 s.
    RequestTimeout = "request_timeout", 408, true, "The request took too long to arrive";
    /// A project of that name exists.
    ProjectExists = "project_exists", 409, false, "A project of that name exists";
    /// A source of that name exists.
    SourceExists = "source_exists", 409, false, "A source of that name exists";
    /// Projects live in the source; `projects` says how many.
    SourceInUse = "source_in_use", 409, false, "Projects use that source";
    /// Tables of a schema that the project would give up are on; `tables` says how many.
    SchemaInUse = "schema_in_use", 409, false, "Tables of that schema are on";
    /// The same `Idempotency-Key` is being worked on.
    IdempotencyInProgress = "idempotency_in_progress", 409, true, "A request with that Idempotency-Key is under way";
    /// Another project owns that schema of the source.
    SchemaTaken = "schema_taken", 409, false, "That schema belongs to another project";
    /// Our role is not the table's owner; `sql` tells the owner what to run.
    NotTableOwner = "not_table_owner", 409, false, "The table has another owner";
    /// The registration's mode is manual, and the table's replica identity isn't FULL; `sql` tells its owner what to run.
    ReplicaIdentityNotFull = "replica_identity_not_full", 409, false, "The table's replica identity is not FULL";
    /// The project's setting `require_rls` takes only tables with row security.
    RowSecurityRequired = "row_security_required", 409, false, "The table has no row security, and the project requires it";
    /// The role that connects lacks a privilege; `sql` tells an administrator what to run.
    SourcePrivilegeMissing = "source_privilege_missing", 409, false, "A privilege is missing on the source";
    /// The engine's state doesn't allow the verb; `legal_verbs` names those it allows.
    EngineStateConflict = "engine_state_conflict", 409, true, "The engine's state does not allow that";
    /// Somebody else's connection holds the slot; we never terminate it.
    SlotInUseByOther = "slot_in_use_by_other", 409, true, "Another program holds the replication slot";
    /// A new slot would skip what the old one still has.
    SlotNotLost = "slot_not_lost", 409, false, "The slot is neither lost nor missing";
    /// The registration changed in between, or the table was replaced while the request ran.
    ConcurrentChange = "concurrent_change", 409, true, "Something else changed it at the same time";
    /// `If-Match` names another version.
    PreconditionFailed = "precondition_failed", 412, false, "It is not the version that If-Match names";
    /// Body or message over the limit.
    PayloadTooLarge = "payload_too_large", 413, false, "The body is too large";
    /// Not `application/json`.
    UnsupportedMediaType = "unsupported_media_type", 415, false, "The content type must be application/json";
    /// The body is JSON, but not what the operation takes (unknown fields included).
    InvalidBody = "invalid_body", 422, false, "The body is not what this operation takes";
    /// A parameter's value is out of range.
    InvalidParameter = "invalid_parameter", 422, false, "A parameter has an illegal value";
    /// The `Idempotency-Key` belongs to another request.
    IdempotencyKeyReused = "idempotency_key_reused", 422, false, "That Idempotency-Key was used for another request";
    /// Not a legal PostgreSQL identifier.
    InvalidName = "invalid_name", 422, false, "Not a PostgreSQL identifier";
    /// Views and materialised views have no changes of their own.
    ViewNotSupported = "view_not_supported", 422, false, "Views have no change stream";
    /// Foreign tables write no log here.
    ForeignTableNotSupported = "foreign_table_not_supported", 422, false, "Foreign tables have no change stream";
    /// Temporary tables write no log.
    TemporaryTableNotSupported = "temporary_table_not_supported", 422, false, "Temporary tables have no change stream";
    /// Unlogged tables write no log.
    UnloggedTableNotSupported = "unlogged_table_not_supported", 422, false, "Unlogged tables have no change stream";
    /// The server's own schemas and ours.
    SystemSchemaNotSupported = "system_schema_not_supported", 422, false, "System schemas have no change stream";
    /// Index, sequence, composite type, …
    RelationNotSupported = "relation_not_supported", 422, false, "This kind of relation has no change stream";
    /// Too many requests.
    RateLimited = "rate_limited", 429, true, "Too many requests";
    /// A defect of ours; the log has more under the request id.
    Internal = "internal", 500, false, "An internal error";
    /// The project's `jwks_url` could not be read yet, so nobody can say whether the token is good.
    KeySetUnavailable = "key_set_unavailable", 503, true, "The project's key set can't be read";
    /// The source answered with an error that we don't know.
    SourceError = "source_error", 502, true, "The source database answered with an error";
    /// No connection to the source.
    SourceUnreachable = "source_unreachable", 503, true, "The source database can't be reached";
    /// The lock wasn't granted in 3 s; `blocking_pid` names who holds it.
    LockTimeout = "lock_timeout", 503, true, "The table is locked by another transaction";
    /// No connection to the platform database.
    PlatformUnavailable = "platform_unavailable", 503, true, "The platform database can't be reached";
    /// The bus isn't connected.
    BusUnavailable = "bus_unavailable", 503, true, "The bus can't be reached";
    /// No worker leads the source's engine, or it doesn't answer.
    EngineNotRunning = "engine_not_running", 503, true, "No worker answers for this source";
    /// This process is about to end.
    ShuttingDown = "shutting_down", 503, true, "This process is shutting down";
    /// The source took too long.
    SourceSlow = "source_slow", 504, true, "The source database took too long";
}

/// The words on the wire: what utoipa derives would be our names for them.
impl utoipa::PartialSchema for Code {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::Schema> {
        let words = Self::ALL.iter().map(|code| code.as_str());
        let schema = utoipa::openapi::ObjectBuilder::new().schema_type(utoipa::openapi::Type::String);
        schema.description(Some("Stable word; each has a page in docs/errors.")).enum_values(Some(words)).into()
    }
}

impl utoipa::ToSchema for Code {}

impl std::fmt::Display for Code {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs};

    use super::*;

    #[test]
    fn every_code_has_its_page_and_every_page_its_code() {
        // A test's working directory is its package.
        let pages =
            fs::read_dir("../../docs/errors").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let pages: BTreeSet<String> = pages.collect();
        let codes: BTreeSet<String> = Code::ALL.iter().map(|code| format!("{code}.md")).collect();
        assert_eq!(pages, codes);
    }

    #[test]
    fn every_page_says_what_happened_and_what_caller_and_operator_do() {
        for code in Code::ALL {
            let page = fs::read_to_string(format!("../../docs/errors/{code}.md")).unwrap();
            assert!(
                page.starts_with(&format!("# `{code}`\n\n{}. HTTP status {}", code.title(), code.status())),
                "{code}"
            );
            for section in ["**Meaning.**", "**What to do.**", "**What the operator does.**"] {
                let said = page.split(section).nth(1).map(str::trim_start);
                assert!(said.is_some_and(|said| said.len() > 5 && !said.starts_with("**")), "{code}: {section}");
            }
            let retry = page.lines().nth(2).unwrap();
            assert_eq!(retry.contains("status") && retry.ends_with(", worth a retry."), code.retryable(), "{code}");
        }
    }

    #[test]
    fn codes_are_words_and_statuses_are_errors() {
        for code in Code::ALL {
            assert!(code.as_str().bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{code}");
            assert!((400..600).contains(&code.status()), "{code}");
            assert_eq!(serde_json::to_value(code).unwrap(), code.as_str());
        }
    }
}
