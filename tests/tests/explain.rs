//! `POST /v1/projects/{project}/explain`, asked as an operator would: why did this subscription (not) get that change?

use anyhow::{Context, Result};
use aura_testkit::{eventually, eventually_some};
use serde_json::{Value, json};
use system_tests::{ALICE, Answer, BOB, PATIENCE, Project, Split, SplitOptions, Subscriber, curl};
use tokio_postgres::Client as Sql;

/// Rows of a table with row security, a column that nobody may read, and policies that hide and raise.
const NOTES: &str = "create table notes (id bigint primary key, owner uuid, room text, body text, secret text);
    alter table notes enable row level security;
    create policy own on notes for select to aura_authenticated using (owner = auth.uid());
    create policy no_hidden on notes as restrictive for select using (room <> 'hidden');
    create policy touchy on notes for select to aura_anon using (1 / (id - 4) > 0);
    revoke select on notes from aura_anon, aura_authenticated";

struct Desk {
    split: Split,
    project: Project,
    sql: Sql,
}

impl Desk {
    async fn start() -> Result<Self> {
        Self::start_with(SplitOptions::default()).await
    }

    async fn start_with(options: SplitOptions) -> Result<Self> {
        let split = Split::start_with(options).await?;
        let project = split.project("tenant").await?;
        let sql = project.sql().await?;
        sql.batch_execute(NOTES).await?;
        for role in ["anon", "authenticated"] {
            let revoke = format!("revoke select on notes from \"p_{}_{role}\"", project.id);
            let grant = format!("grant select (id, owner, room, body) on notes to \"p_{}_{role}\"", project.id);
            sql.batch_execute(&format!("{revoke}; {grant}")).await?;
        }
        project.enable("notes").await?;
        Ok(Self { split, project, sql })
    }

    async fn ask(&self, body: &Value) -> Result<Answer> {
        let url = format!("{}/v1/projects/{}/explain", self.project.api_url, self.project.id);
        curl("POST", &url, &self.project.service_key, Some(body)).await
    }

    async fn explained(&self, body: &Value) -> Result<Value> {
        let answer = self.ask(body).await?;
        anyhow::ensure!(answer.status == 200, "{}\n{}", answer.body, self.split.logs());
        Ok(answer.body)
    }

    /// Inserts a row of Alice's and answers its position, once it was sent.
    async fn insert(&self, id: i64, room: &str) -> Result<String> {
        let insert = format!("insert into notes values ({id}, '{ALICE}', '{room}', 'b', 's')");
        self.sql.batch_execute(&insert).await?;
        self.sent("notes", &json!({"id": id.to_string()})).await
    }

    /// Waits until the newest change is the one of this id; answers its position.
    async fn sent(&self, table: &str, id: &Value) -> Result<String> {
        let filter = format!("id=eq.{}", id["id"].as_str().unwrap_or_default());
        let body = json!({"subscription": {"table": table, "role": "service_role", "filter": filter}});
        let explained = self.until_sent(&body).await?;
        explained["position"].as_str().map(str::to_owned).context("a position")
    }

    async fn until_sent(&self, body: &Value) -> Result<Value> {
        let sent = eventually_some(PATIENCE, || async {
            let explained = self.explained(body).await.ok()?;
            (explained["outcome"] == "sent").then_some(explained)
        });
        sent.await.with_context(|| self.split.logs())
    }
}

fn step<'a>(explained: &'a Value, name: &str) -> &'a Value {
    let steps = explained["steps"].as_array().map(Vec::as_slice).unwrap_or_default();
    steps.iter().find(|step| step["step"] == name).unwrap_or(&Value::Null)
}

/// Everybody passes up to the step that is the reason.
fn assert_fails_at(explained: &Value, name: &str) {
    assert_eq!((&explained["outcome"], &explained["reason"]), (&json!("dropped"), &json!(name)), "{explained:#}");
    let steps = explained["steps"].as_array().expect("steps");
    let before = steps.iter().take_while(|step| step["step"] != name);
    assert!(before.into_iter().all(|step| step["passed"] == true), "{explained:#}");
    assert_eq!(step(explained, name)["passed"], json!(false), "{explained:#}");
}

fn alice(more: &Value) -> Value {
    let mut subscription = json!({"table": "notes", "role": "authenticated", "claims": {"sub": ALICE}});
    let members = subscription.as_object_mut().expect("an object");
    members.extend(more.as_object().cloned().unwrap_or_default());
    subscription
}

#[tokio::test]
async fn r_rls_explain_says_which_step_decided() -> Result<()> {
    let desk = Desk::start().await?;
    let position = desk.insert(1, "open").await?;
    let at = |subscription: Value| json!({"subscription": subscription, "change": {"position": position}});

    // Sent: who, through which policy, without which column, and when.
    let explained = desk.explained(&at(alice(&json!({"filter": "room=in.(open,other)"})))).await?;
    assert_eq!((&explained["outcome"], &explained["reason"]), (&json!("sent"), &Value::Null), "{explained:#}");
    let names: Vec<_> = explained["steps"].as_array().unwrap().iter().map(|step| step["step"].clone()).collect();
    let all = ["registered", "in_filter", "decoded", "binding", "filter", "grants", "policies", "columns", "sent"];
    assert_eq!(json!(names), json!(all));
    let policies = &step(&explained, "policies")["detail"];
    assert_eq!(policies["claims"]["sub"], json!(ALICE));
    let seen: Vec<_> = policies["policies"].as_array().unwrap().iter().map(|p| (&p["name"], &p["passed"])).collect();
    assert_eq!(json!(seen), json!([["no_hidden", true], ["own", true]]), "not the one for anon: {policies:#}");
    assert_eq!(policies["policies"][1]["claims"], json!(["sub"]));
    assert_eq!(policies["policies"][0]["permissive"], json!(false));
    let columns = &step(&explained, "columns")["detail"];
    assert_eq!(columns["removed"], json!([{"name": "secret", "reason": "no_select_privilege"}]), "R-RLS-3");
    assert!(step(&explained, "sent")["detail"]["at"].is_string());
    let condition = &step(&explained, "filter")["detail"]["conditions"][0];
    assert_eq!((&condition["row"]["value"], &condition["passed"]), (&json!("open"), &json!(true)), "{condition}");

    // The same for a token of hers, and less for a narrower selection.
    let token = json!({"table": "notes", "token": desk.project.user_token(ALICE), "select": ["body"]});
    let explained = desk.explained(&at(token)).await?;
    assert_eq!(explained["outcome"], json!("sent"), "{explained:#}");
    assert_eq!(step(&explained, "columns")["detail"]["visible"], json!(["id", "body"]));

    // The filter, the event, another's eyes.
    assert_fails_at(&desk.explained(&at(alice(&json!({"filter": "room=eq.other"})))).await?, "filter");
    assert_fails_at(&desk.explained(&at(alice(&json!({"event": "DELETE"})))).await?, "binding");
    let bob = json!({"table": "notes", "role": "authenticated", "claims": {"sub": BOB}});
    let explained = desk.explained(&at(bob)).await?;
    assert_fails_at(&explained, "policies");
    assert!(step(&explained, "policies")["message"].as_str().is_some_and(|text| text.contains("No permissive policy")));

    // Refused at a join: a column that the role may not read, in filter and selection.
    let explained = desk.explained(&at(alice(&json!({"filter": "secret=eq.s"})))).await?;
    assert_fails_at(&explained, "filter");
    assert!(step(&explained, "filter")["message"].as_str().is_some_and(|text| text.contains("invalid column")));
    assert_fails_at(&desk.explained(&at(alice(&json!({"select": ["secret"]})))).await?, "columns");
    let stranger = json!({"table": "notes", "role": "postgres"});
    assert_fails_at(&desk.explained(&at(stranger)).await?, "grants");

    // A restrictive policy, and one that raises.
    let hidden = desk.insert(2, "hidden").await?;
    let explained = desk.explained(&json!({"subscription": alice(&json!({})), "change": {"position": hidden}})).await?;
    assert_fails_at(&explained, "policies");
    assert!(step(&explained, "policies")["message"].as_str().is_some_and(|text| text.contains("no_hidden")));
    let raising = desk.insert(4, "open").await?;
    let anon = json!({"table": "notes", "role": "anon"});
    let explained = desk.explained(&json!({"subscription": anon, "change": {"position": raising}})).await?;
    assert_fails_at(&explained, "policies");
    let policies = &step(&explained, "policies")["detail"];
    assert_eq!(policies["error"], json!("policy_raised"));
    let touchy = policies["policies"].as_array().unwrap().iter().find(|policy| policy["name"] == "touchy");
    let error = json!({"sqlstate": "22012", "message": "division by zero"});
    assert_eq!(touchy.map(|policy| &policy["error"]), Some(&error));
    Ok(())
}

#[tokio::test]
async fn r_rls_1_explain_tells_what_of_an_old_row_is_shown() -> Result<()> {
    let desk = Desk::start().await?;
    desk.insert(1, "open").await?;
    desk.sql.batch_execute(&format!("update notes set owner = '{BOB}', body = 'c' where id = 1")).await?;
    let bob = json!({"table": "notes", "role": "authenticated", "claims": {"sub": BOB}, "event": "UPDATE"});
    let explained = desk.until_sent(&json!({"subscription": bob})).await?;
    assert_eq!(step(&explained, "policies")["detail"]["old_row_visible"], json!(false));
    assert_eq!(step(&explained, "columns")["detail"]["old_record"], json!("key_only"));
    assert_eq!(explained["remembered"]["changes"], json!(2));
    Ok(())
}

#[tokio::test]
async fn explain_says_what_it_does_not_know() -> Result<()> {
    let desk = Desk::start().await?;
    let position = desk.insert(1, "open").await?;

    // A table that nobody turned on, and one that was turned on after the change.
    desk.sql.batch_execute("create table later (id bigint primary key, body text)").await?;
    let later = json!({"subscription": {"table": "later", "role": "anon"}, "change": {"position": position}});
    let explained = desk.explained(&later).await?;
    assert_fails_at(&explained, "registered");
    desk.project.enable("later").await?;
    let insert = "insert into later values (1, 'x')";
    desk.sql.batch_execute(insert).await?;
    let first = desk.sent("later", &json!({"id": "1"})).await?;
    let (generation, rest) = first.split_once('-').context("a position")?;
    let early = format!("{generation}-{:016x}-{:016x}-0", 1, 1);
    assert!(!rest.is_empty());
    let explained = desk
        .explained(&json!({"subscription": {"table": "later", "role": "anon"}, "change": {"position": early}}))
        .await?;
    assert_fails_at(&explained, "in_filter");
    assert!(step(&explained, "in_filter")["detail"]["active_since_lsn"].is_string(), "{explained:#}");

    // Of a change that is not remembered but may have been read, nobody says that it came too early: another table's filter
    // is newer than it.
    desk.sql.batch_execute("create table latest (id bigint primary key)").await?;
    desk.project.enable("latest").await?;
    let (head, _) = first.rsplit_once('-').context("a position")?;
    let forgotten = format!("{head}-9");
    let explained = desk
        .explained(&json!({"subscription": {"table": "later", "role": "anon"}, "change": {"position": forgotten}}))
        .await?;
    assert_eq!(explained["outcome"], "unknown", "{explained:#}");

    // A position that is not remembered: nothing is guessed, and the range is told.
    let unknown = format!("{generation}-{:016x}-{:016x}-0", u64::MAX >> 1, u64::MAX >> 1);
    let explained =
        desk.explained(&json!({"subscription": alice(&json!({})), "change": {"position": unknown}})).await?;
    assert_eq!((&explained["outcome"], &explained["reason"]), (&json!("unknown"), &Value::Null), "{explained:#}");
    assert_eq!(explained["remembered"]["from"], json!(position));
    // One of another table.
    let explained = desk.explained(&json!({"subscription": alice(&json!({})), "change": {"position": first}})).await?;
    assert_fails_at(&explained, "binding");
    Ok(())
}

/// Nobody knows a position by heart: the row will do. And what was said when the row was judged outlasts what would be
/// said now.
#[tokio::test]
async fn explain_finds_a_row_and_remembers_for_whom_it_could_not_be_judged() -> Result<()> {
    let desk = Desk::start().await?;
    desk.insert(1, "open").await?;
    desk.insert(2, "open").await?;
    let ask = json!({"subscription": alice(&json!({})), "change": {"row": {"id": 1}}});
    let explained = desk.explained(&ask).await?;
    assert_eq!(
        (&explained["outcome"], &step(&explained, "decoded")["detail"]["key"]),
        (&json!("sent"), &json!({"id": "1"}))
    );
    let none = desk.explained(&json!({"subscription": alice(&json!({})), "change": {"row": {"id": 77}}})).await?;
    assert_eq!(none["outcome"], "unknown");
    for nonsense in [json!({"row": {}}), json!({"row": {"id": [1]}}), json!({"row": {"id": 1}, "position": "x"})] {
        let answer = desk.ask(&json!({"subscription": alice(&json!({})), "change": nonsense})).await?;
        assert_eq!(answer.status, 422, "{}", answer.body);
    }

    // Somebody listens whose policy raises; then the policy is mended.
    let subscriber = Subscriber::start(&desk.project, "notes").await?;
    desk.sql.batch_execute(&format!("insert into notes values (4, '{ALICE}', 'open', 'b', 's')")).await?;
    eventually(PATIENCE, || async { subscriber.seen().gaps.iter().any(|gap| gap.reason == "policy_error") }).await?;
    desk.sql.batch_execute("alter policy touchy on notes using (true)").await?;
    let anon = json!({"table": "notes", "token": desk.project.anon_key});
    let explained = desk.explained(&json!({"subscription": anon, "change": {"row": {"id": 4}}})).await?;
    assert_fails_at(&explained, "sent");
    assert_eq!(step(&explained, "sent")["detail"]["gap"], "policy_raised", "{explained:#}");

    // Where the role may read nothing, policies have nothing to say.
    let revoke = format!(
        "revoke select on notes from \"p_{}_authenticated\"; revoke select (id, owner, room, body) on notes from \"p_{0}_authenticated\"",
        desk.project.id
    );
    desk.sql.batch_execute(&revoke).await?;
    let explained = desk.explained(&ask).await?;
    assert_fails_at(&explained, "grants");
    assert_eq!(step(&explained, "policies")["passed"], Value::Null, "{explained:#}");
    Ok(())
}

/// The log switch says the same while it happens, and no value of a row.
#[tokio::test]
async fn explain_in_the_log_has_a_line_per_verdict_without_values() -> Result<()> {
    let desk = Desk::start_with(SplitOptions::default().worker("CDC_EXPLAIN", "all")).await?;
    let _anon = Subscriber::start(&desk.project, "notes").await?;
    let wanted = |position: String, words: [&'static str; 2]| {
        move |line: &str| {
            line.contains("aura::explain") && line.contains(&position) && words.iter().all(|w| line.contains(w))
        }
    };
    let worker = &desk.split.worker.process;
    worker.line(PATIENCE, wanted(desk.insert(5, "classified").await?, ["sent", "anon"])).await?;
    worker
        .line(PATIENCE, wanted(desk.insert(6, "classified").await?, ["dropped", "Row security hides the row"]))
        .await?;
    worker.line(PATIENCE, wanted(desk.insert(4, "classified").await?, ["dropped", "A policy raised an error"])).await?;
    let told: Vec<_> = worker.lines().into_iter().filter(|line| line.contains("aura::explain")).collect();
    assert!(!told.iter().any(|line| line.contains("classified") || line.contains(ALICE)), "{told:?}");
    Ok(())
}

/// Denied, counted, and told to whom it concerns by an error that comes once.
#[tokio::test]
async fn r_rls_4_a_policy_on_a_system_column_is_told_to_its_subscribers() -> Result<()> {
    let desk = Desk::start().await?;
    desk.project.table("odd").await?;
    let policy =
        "alter table odd enable row level security; create policy sys on odd for select using (ctid is not null)";
    desk.sql.batch_execute(policy).await?;
    let warned = desk.project.enable("odd").await?;
    assert!(warned["warnings"].as_array().is_some_and(|all| all.iter().any(|w| w["code"] == "policy_not_judgeable")));
    let subscriber = Subscriber::start(&desk.project, "odd").await?;
    desk.sql.batch_execute("insert into odd values (1, 'x')").await?;
    let errors = || {
        let said = subscriber.seen().said;
        said.iter().filter(|said| said["status"] == "error").map(|said| said["message"].clone()).collect::<Vec<_>>()
    };
    eventually(PATIENCE, || async { !errors().is_empty() }).await.with_context(|| desk.split.logs())?;
    desk.sql.batch_execute("insert into odd values (2, 'x')").await?;
    eventually(PATIENCE, || async { subscriber.seen().gaps.iter().any(|gap| gap.reason == "not_judgeable") }).await?;
    let errors = errors();
    assert!(errors.len() == 1 && errors[0].as_str().is_some_and(|text| text.contains("public.odd")), "{errors:?}");
    assert!(subscriber.seen().changes.is_empty(), "denied");
    assert!(desk.split.worker.metric("cdc_not_judgeable_total").await?.is_some_and(|count| count >= 2.0));
    let explained = desk.explained(&json!({"subscription": {"table": "odd", "role": "anon"}})).await?;
    assert_fails_at(&explained, "policies");
    assert_eq!(step(&explained, "policies")["detail"]["error"], json!("not_judgeable"), "{explained:#}");
    Ok(())
}

#[tokio::test]
async fn explain_judges_a_made_up_row_and_refuses_nonsense() -> Result<()> {
    let desk = Desk::start().await?;
    let made_up = |owner: &str, room: &str| {
        let record = json!({"id": 7, "owner": owner, "room": room, "body": null});
        json!({"subscription": alice(&json!({"filter": "id=eq.7"})), "change": {"type": "INSERT", "record": record}})
    };
    let explained = desk.explained(&made_up(ALICE, "open")).await?;
    assert_eq!((&explained["outcome"], &explained["position"]), (&json!("would_send"), &Value::Null), "{explained:#}");
    let explained = desk.explained(&made_up(BOB, "open")).await?;
    assert_eq!((&explained["outcome"], &explained["reason"]), (&json!("would_drop"), &json!("policies")));
    let unknown = json!({"subscription": alice(&json!({})), "change": {"type": "INSERT", "record": {"nope": 1}}});
    let explained = desk.explained(&unknown).await?;
    assert_eq!(explained["reason"], json!("decoded"), "{explained:#}");

    let both = json!({"table": "notes", "role": "anon", "token": "x"});
    let bad = [
        json!({"subscription": both}),
        json!({"subscription": {"table": "notes"}}),
        json!({"subscription": {"table": "notes", "role": "anon", "event": "SELECT"}}),
        json!({"subscription": {"table": "notes", "token": "x"}}),
        json!({"subscription": {"table": "*", "role": "anon"}}),
        json!({"subscription": alice(&json!({})), "change": {"position": "1-2"}}),
        json!({"subscription": alice(&json!({})), "change": {"type": "DELETE", "record": {}}}),
        json!({"subscription": alice(&json!({})), "change": {}}),
        json!({"subscription": alice(&json!({})), "other": 1}),
    ];
    for body in bad {
        let answer = desk.ask(&body).await?;
        assert_eq!((answer.status, &answer.body["code"]), (422, &json!("invalid_body")), "{body}: {}", answer.body);
    }

    // Nobody leads the engine.
    let stopped = desk.split.verb("stop", json!({"deadline_ms": 5000})).await?;
    assert_eq!(stopped.status, 200, "{}", stopped.body);
    let answer = desk.ask(&made_up(ALICE, "open")).await?;
    assert_eq!((answer.status, &answer.body["code"]), (503, &json!("engine_not_running")), "{}", answer.body);
    assert_eq!(answer.body["retryable"], json!(true));
    Ok(())
}

/// A thousand changes or so many bytes; whoever writes much forgets his own first, and large rows are remembered without values.
#[tokio::test]
async fn explain_remembers_within_its_bytes_and_a_loud_project_forgets_its_own() -> Result<()> {
    const BYTES: u32 = 256 << 10;
    let desk = Desk::start_with(SplitOptions::default().worker("CDC_EXPLAIN_MEMORY", &BYTES.to_string())).await?;
    let quiet = desk.split.project("quiet").await?;
    quiet.table("calm").await?;
    quiet.sql().await?.batch_execute("insert into calm values (1, 'x')").await?;
    let url = format!("{}/v1/projects/{}/explain", quiet.api_url, quiet.id);
    let question = json!({"subscription": {"table": "calm", "role": "anon"}});
    let quiet_is_sent = async || {
        let answer = curl("POST", &url, &quiet.service_key, Some(&question)).await;
        answer.is_ok_and(|answer| answer.body["outcome"] == "sent")
    };
    eventually(PATIENCE, &quiet_is_sent).await.with_context(|| desk.split.logs())?;
    let flood = format!("insert into notes select n, '{ALICE}', 'open', 'b' from generate_series(10, 3000) n");
    desk.sql.batch_execute(&flood).await?;
    desk.insert(3001, "open").await?;
    let explained = desk.explained(&json!({"subscription": alice(&json!({}))})).await?;
    let changes = explained["remembered"]["changes"].as_u64().context("a number")?;
    assert!((10..1000).contains(&changes), "{changes}");
    let bytes = desk.split.worker.metric("cdc_explain_bytes").await?.context("a gauge")?;
    assert!(bytes > 0.0 && bytes <= f64::from(BYTES), "{bytes}");
    assert!(quiet_is_sent().await, "the quiet project's change is still there");

    let large = format!("insert into notes values (3002, '{ALICE}', 'open', repeat('x', 10000), 's')");
    desk.sql.batch_execute(&large).await?;
    let without_values = || async {
        let explained = desk.explained(&json!({"subscription": alice(&json!({}))})).await.ok()?;
        let message = step(&explained, "decoded")["message"].as_str().unwrap_or_default().to_owned();
        message.contains("too large to be remembered").then_some(explained)
    };
    let explained = eventually_some(PATIENCE, without_values).await.with_context(|| desk.split.logs())?;
    assert_eq!((&explained["outcome"], step(&explained, "policies")["passed"].is_null()), (&json!("unknown"), true));
    Ok(())
}
