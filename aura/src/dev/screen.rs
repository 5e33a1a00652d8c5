//! What `dev` prints: for people, or one JSON object per line.

use std::io::Write;

use serde_json::{Value, json};

/// Standard output. A reader that went away is no reason to stop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Screen {
    json: bool,
}

impl Screen {
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// One line of news; `kind` is its `type` in JSON.
    pub(crate) fn note(self, kind: &str, text: &str) {
        self.object(kind, json!({"message": text}), &format!("  {text}"));
    }

    /// An object in JSON mode, a text otherwise.
    pub(crate) fn object(self, kind: &str, mut object: Value, text: &str) {
        if self.json {
            object["type"] = json!(kind);
            line(&object.to_string());
        } else {
            line(text);
        }
    }
}

fn line(text: &str) {
    let mut out = std::io::stdout().lock();
    // Nothing to do about a closed pipe.
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}
