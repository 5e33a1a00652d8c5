//! What one needs to know once everything runs: `dev.json` and the box.

use std::path::Path;

use serde::Serialize;
use serde_json::{Value, json};

use super::{demo::Demo, screen::Screen};

/// `dev.json` (design §5.6).
#[derive(Debug, Clone, Serialize)]
pub(crate) struct DevFile {
    /// Origin.
    pub(crate) api_url: String,
    /// `ws://…/realtime/v1`.
    pub(crate) ws_url: String,
    pub(crate) studio_url: String,
    /// Superuser of the private cluster.
    pub(crate) database_url: String,
    /// Owner of the platform tables.
    pub(crate) platform_database_url: String,
    pub(crate) platform_key: String,
    pub(crate) pid: u32,
    #[serde(flatten)]
    pub(crate) demo: Option<Demo>,
}

impl DevFile {
    /// Prints the box, or the JSON object without secrets.
    pub(crate) fn print(&self, screen: Screen, data_dir: &Path) {
        let file = data_dir.join("dev.json");
        let mut object = json!({
            "api_url": self.api_url,
            "ws_url": self.ws_url,
            "studio_url": self.studio_url,
            "dev_json": file.display().to_string(),
            "pid": self.pid,
        });
        if let Some(demo) = &self.demo {
            object["project_id"] = json!(demo.project_id);
            object["anon_key"] = json!(demo.anon_key);
        }
        screen.object("ready", object, &self.boxed(&file));
    }

    fn boxed(&self, file: &Path) -> String {
        let mut lines = vec![
            row("API", &format!("{}/v1   reference: {}/docs", self.api_url, self.api_url)),
            row("Realtime", &format!("{}/websocket   SSE: {}/realtime/v1/sse", self.ws_url, self.api_url)),
            row("Studio", &self.studio_url),
            row("Database", &without_password(&self.database_url)),
        ];
        match &self.demo {
            Some(demo) => lines.extend(self.demo_lines(demo, file)),
            None => lines.push(row("Keys", &file.display().to_string())),
        }
        let body: Vec<String> = lines.iter().map(|line| format!("  │ {line}").trim_end().to_owned()).collect();
        let title = format!("aura-realtime {} · dev ", env!("CARGO_PKG_VERSION"));
        format!(
            "\n  ╭─ {title}{}\n{}\n  ╰{}\n",
            "─".repeat(50),
            body.join("\n"),
            "─".repeat(52 + title.chars().count())
        )
    }

    fn demo_lines(&self, demo: &Demo, file: &Path) -> Vec<String> {
        let secret = |name: &str| format!("jq -r .{name} {}", file.display());
        let snippet = format!(
            "createClient('{}', '<anon key>', {{ realtime: {{ transport: ws }} }}).channel('demo')\n\
             .on('postgres_changes', {{ event: '*', schema: 'public', table: 'messages' }}, console.log).subscribe()",
            self.api_url
        );
        let mut lines = vec![
            String::new(),
            row("Project", &format!("demo ({})   table public.messages, users alice and bob", demo.project_id)),
            row("anon key", &demo.anon_key),
            row("service key", &format!("shown by: {}", secret("service_role_key"))),
            String::new(),
            "Make a table live:".to_owned(),
            format!(
                "  psql \"$({})\" -c 'create table todos (id int primary key, title text)'",
                secret("database_url")
            ),
            format!("  curl -X PUT {}/v1/db/{}/schema/tables/todos/realtime \\", self.api_url, demo.project_id),
            format!("    -H \"apikey: $({})\" -H 'content-type: application/json' \\", secret("service_role_key")),
            "    -d '{\"enabled\": true}'".to_owned(),
            String::new(),
            "Watch it with supabase-js (`import ws from 'ws'`; browsers and Node 22 need no transport):".to_owned(),
        ];
        lines.extend(snippet.lines().map(|line| format!("  {line}")));
        lines
    }
}

fn row(name: &str, value: &str) -> String {
    format!("{name:<12}{value}")
}

/// Passwords stay in the file that only we can read.
fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else { return url.to_owned() };
    match rest.split_once('@') {
        Some((user, place)) => format!("{scheme}://{}@{place}", user.split(':').next().unwrap_or_default()),
        None => url.to_owned(),
    }
}

/// One line per change: what, and how long from its commit to our socket (commit times have milliseconds).
pub(crate) fn event_line(data: &Value, latency_ms: Option<i64>) -> String {
    let text = |name: &str| data[name].as_str().unwrap_or("?").to_owned();
    let row = if data["record"].is_object() { &data["record"] } else { &data["old_record"] };
    let time = data["commit_timestamp"].as_str().and_then(|time| time.get(11..23)).unwrap_or_default().to_owned();
    let latency = latency_ms.map_or_else(|| "?".to_owned(), |ms| ms.to_string());
    format!(
        "  {time}  {:<6} {}.{}  {}   commit→socket {latency} ms",
        text("type"),
        text("schema"),
        text("table"),
        short(row)
    )
}

fn short(row: &Value) -> String {
    const LONGEST: usize = 100;
    let text = row.to_string();
    if text.chars().count() <= LONGEST { text } else { text.chars().take(LONGEST).chain(['…']).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_box_shows_no_password() {
        assert_eq!(without_password("postgres://u:secret@127.0.0.1:1/app"), "postgres://u@127.0.0.1:1/app");
        assert_eq!(without_password("postgres://127.0.0.1/app"), "postgres://127.0.0.1/app");
    }

    #[test]
    fn an_event_is_one_short_line() {
        let record = json!({"id": 1, "body": "x".repeat(500)});
        let data = json!({"type": "INSERT", "schema": "public", "table": "t", "record": record,
            "commit_timestamp": "2026-01-05T10:20:30.123Z"});
        let line = event_line(&data, Some(3));
        assert!(line.starts_with("  10:20:30.123  INSERT public.t"), "{line}");
        assert!(line.ends_with("commit→socket 3 ms") && line.chars().count() < 200, "{line}");
    }
}
