//! Who may toggle a table (design §6), and that a refusal changed nothing.

use anyhow::Result;
use serde_json::json;

use system_tests::{Dev, curl, sign};

#[tokio::test]
async fn r_sec_1_only_the_projects_own_service_key_toggles() -> Result<()> {
    let dev = Dev::start(&[]).await?;
    let project = dev.demo()?;
    let platform_key = dev.file()?["platform_key"].as_str().unwrap_or_default().to_owned();
    let url = format!("{}/v1/projects", project.api_url);
    let other = curl("POST", &url, &platform_key, Some(&json!({"name": "other"}))).await?;
    assert_eq!(other.status, 201, "{}", other.body);
    let other_key = other.body["service_role_key"].as_str().unwrap_or_default().to_owned();
    let sql = project.sql().await?;
    sql.batch_execute("create table guarded (id int primary key)").await?;

    let claims = json!({"iss": "aura", "ref": project.id, "role": "service_role", "iat": 1, "exp": 4_000_000_000_u32});
    let expired = json!({"iss": "aura", "ref": project.id, "role": "service_role", "iat": 1, "exp": 1000});
    let keys = [
        ("no key", String::new(), 401),
        ("garbage", "garbage".to_owned(), 401),
        ("anon key", project.anon_key.clone(), 403),
        ("end user", project.user_token("somebody"), 403),
        ("other project's key", other_key, 404),
        ("expired", project.token(&expired), 401),
        ("forged", sign("another secret of another tenant, long enough", &claims), 401),
        // Signed with the project's secret, but no key that was ever handed out.
        ("without a live key id", project.token(&claims), 401),
    ];
    for (name, key, status) in keys {
        let answer = curl("PUT", &project.toggle_url("guarded"), &key, Some(&json!({"enabled": true}))).await?;
        assert_eq!(answer.status, status, "{name}: {}", answer.body);
        assert!(answer.body["code"].is_string() && answer.body["request_id"].is_string(), "{name}: {}", answer.body);
        assert!(!answer.body["detail"].to_string().contains(&project.id), "{name} is told the project");
    }
    let identity = "select relreplident::text from pg_class where oid = 'guarded'::regclass";
    let before: String = sql.query_one(identity, &[]).await?.get(0);
    assert_eq!(before, "d", "no DDL ran");
    project.enable("guarded").await?;
    let after: String = sql.query_one(identity, &[]).await?.get(0);
    assert_eq!(after, "f");
    Ok(())
}
