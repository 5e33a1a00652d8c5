use std::fmt;

use aura_domain::{ProjectId, SourceId};

/// A subject of the bus (design §9). Built only here, so no name from outside can inject `.`, `*` or `>`.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Subject(String);

/// A name from outside makes an unusable subject.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubjectError {
    /// A longer subject makes nats-server close everyone's connection.
    #[error("the encoded subject is longer than {} bytes", Subject::MAX_BYTES)]
    TooLong,
}

impl Subject {
    /// Longest subject we send, in bytes.
    pub const MAX_BYTES: usize = 1024;

    /// `aura.realtime.<project>.changes.<schema>.<table>`, by the worker only.
    pub fn changes(project: ProjectId, schema: &str, table: &str) -> Self {
        // Names have at most 63 bytes, so this never passes the limit.
        Self(format!("aura.realtime.{project}.changes.{}.{}", encode_token(schema), encode_token(table)))
    }

    /// `aura.realtime.<project>.gap`, by the worker only.
    pub fn gap(project: ProjectId) -> Self {
        Self(format!("aura.realtime.{project}.gap"))
    }

    /// `aura.realtime.<project>.channel.<public|private>.<topic>`, between fronts.
    pub fn channel(project: ProjectId, private: bool, topic: &str) -> Result<Self, SubjectError> {
        let kind = if private { "private" } else { "public" };
        Self::bounded(format!("aura.realtime.{project}.channel.{kind}.{}", encode_token(topic)))
    }

    /// `aura.realtime.<project>.>`: what a front takes of a project (R-FRT-4).
    pub fn project_tree(project: ProjectId) -> Self {
        Self(format!("aura.realtime.{project}.>"))
    }

    /// Requests of fronts to the worker that leads a source; only that worker subscribes.
    pub fn source_requests(source: SourceId) -> Self {
        Self(format!("aura.control.source.{source}.request"))
    }

    /// Questions why somebody did or did not get a change, to the worker that leads a source: an
    /// [`aura_domain::explain::Question`], answered with an [`aura_domain::explain::Answer`], both JSON.
    pub fn explain(source: SourceId) -> Self {
        Self(format!("aura.control.source.{source}.explain"))
    }

    /// Announcements of the worker that leads a source, to all fronts.
    pub fn source_announcements(source: SourceId) -> Self {
        Self(format!("aura.control.source.{source}.announce"))
    }

    /// The same of all sources.
    pub fn all_announcements() -> Self {
        Self("aura.control.source.*.announce".to_owned())
    }

    /// A [`Disconnect`](crate::control::Disconnect) of the api to all fronts.
    pub fn disconnect(project: ProjectId) -> Self {
        Self(format!("aura.control.project.{project}.disconnect"))
    }

    /// The same of all projects.
    pub fn all_disconnects() -> Self {
        Self("aura.control.project.*.disconnect".to_owned())
    }

    /// Heartbeats of all fronts, to all workers.
    pub fn front_heartbeats() -> Self {
        Self("aura.control.front.heartbeat".to_owned())
    }

    /// A subject that the bus itself made or received; not checked again.
    pub fn from_bus(text: String) -> Self {
        Self(text)
    }

    /// The subject's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The project of an `aura.realtime.<project>.…` or `aura.control.project.<project>.…` subject.
    pub fn project(&self) -> Option<ProjectId> {
        let rest = self.0.strip_prefix("aura.realtime.").or_else(|| self.0.strip_prefix("aura.control.project."))?;
        rest.split('.').next()?.parse().ok()
    }

    /// NATS's matching: `*` is one token, a last `>` one or more.
    pub fn matches(&self, subject: &Self) -> bool {
        let mut pattern = self.0.split('.').peekable();
        let mut tokens = subject.0.split('.');
        while let Some(want) = pattern.next() {
            match (want, tokens.next()) {
                (">", Some(_)) if pattern.peek().is_none() => return true,
                ("*", Some(_)) => {}
                (want, Some(token)) if want == token => {}
                _ => return false,
            }
        }
        tokens.next().is_none()
    }

    fn bounded(text: String) -> Result<Self, SubjectError> {
        if text.len() > Self::MAX_BYTES { Err(SubjectError::TooLong) } else { Ok(Self(text)) }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A name as one token: `=XX` for every byte outside `[A-Za-z0-9_-]` (`%` is illegal in KV keys). The empty name, which
/// can't be a token, is `=`.
pub fn encode_token(name: &str) -> String {
    use fmt::Write;
    if name.is_empty() {
        return "=".to_owned();
    }
    name.bytes().fold(String::with_capacity(name.len()), |mut token, byte| {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => token.push(char::from(byte)),
            _ => write!(token, "={byte:02X}").expect("writing to a String"),
        }
        token
    })
}

/// The name behind a token; `None` when it isn't one of ours.
pub fn decode_token(token: &str) -> Option<String> {
    if token == "=" {
        return Some(String::new());
    }
    let mut bytes = Vec::with_capacity(token.len());
    let mut rest = token.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first == b'=' {
            let (hex, tail) = rest.split_at_checked(2)?;
            bytes.push(u8::from_str_radix(std::str::from_utf8(hex).ok()?, 16).ok()?);
            rest = tail;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_name_can_inject_a_separator_or_wildcard() {
        for name in ["a.b", "*", ">", "realtime:x.>", "we,ird. t'b*l", "=41", "", "🦀", "a b", "a\0"] {
            let token = encode_token(name);
            assert!(token.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-=".contains(&b)) && !token.is_empty());
            assert_eq!(decode_token(&token).as_deref(), Some(name));
        }
        assert_ne!(encode_token("a.b"), encode_token("a=2Eb"));
    }

    #[test]
    fn a_long_topic_is_refused() {
        let project = ProjectId(uuid_nil());
        assert!(Subject::channel(project, false, &"é".repeat(127)).is_ok());
        assert_eq!(Subject::channel(project, false, &"é".repeat(500)), Err(SubjectError::TooLong));
    }

    #[test]
    fn matching_is_as_in_nats() {
        let subject = |text: &str| Subject::from_bus(text.to_owned());
        assert!(subject("a.*.c").matches(&subject("a.b.c")));
        assert!(subject("a.>").matches(&subject("a.b.c")));
        assert!(!subject("a.>").matches(&subject("a")));
        assert!(!subject("a.b").matches(&subject("a.b.c")));
        assert!(!subject("a.b.c").matches(&subject("a.b")));
        let project = ProjectId(uuid_nil());
        assert!(Subject::project_tree(project).matches(&Subject::changes(project, "public", "a.b")));
        assert_eq!(Subject::gap(project).project(), Some(project));
    }

    fn uuid_nil() -> uuid::Uuid {
        uuid::Uuid::nil()
    }
}
