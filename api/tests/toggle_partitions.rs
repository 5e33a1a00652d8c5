//! Partitioned tables go live through their partitions (R-REG-4).

use anyhow::Result;
use axum::http::{Method, StatusCode};
use serde_json::json;

use crate::{
    harness::{Platform, toggle},
    toggle::{get, put},
};

/// R-REG-4: of a partitioned table the partitions that hold rows get the whole old rows, and what they had back.
#[tokio::test]
async fn r_reg_4_a_partitioned_table_is_live_through_its_partitions() -> Result<()> {
    let platform = Platform::start().await?;
    let tenant = platform.tenant("demo").await?;
    let sql = "create table s.root (id int, k int, primary key (id, k)) partition by list (k);
        create table s.one partition of s.root for values in (1);
        create table s.deep partition of s.root for values in (2, 3) partition by list (k);
        create table s.two partition of s.deep for values in (2);
        create table s.three partition of s.deep for values in (3);
        alter table s.one replica identity nothing;
        create unique index two_key on s.two (k, id);
        alter table s.two replica identity using index two_key";
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    platform.play_worker().await?;
    let identities = async || -> Result<String> {
        let mut letters = String::new();
        for table in ["one", "two", "three"] {
            letters.push(platform.replica_identity(&tenant, table).await?);
        }
        Ok(letters)
    };
    let path = toggle(&tenant, "root");
    let call = platform.call(Method::PUT, &format!("{path}?dry_run=true")).key(&tenant.service);
    let plan = call.json(&json!({"enabled": true})).send().await?.body["plan"].to_string();
    assert!(["one", "two", "three"].iter().all(|leaf| plan.contains(&format!(".\\\"{leaf}\\\" REPLICA"))), "{plan}");
    assert_eq!(identities().await?, "nid", "only shown");

    assert_eq!(put(&platform, &tenant, "three", true).await?.status, StatusCode::OK, "a partition may be live itself");
    let on = put(&platform, &tenant, "root", true).await?;
    assert_eq!((on.status, &on.body["status"]), (StatusCode::OK, &json!("active")), "{}", on.body);
    assert_eq!((&on.body["replica_identity"], identities().await?), (&json!("full"), "fff".to_owned()));
    let listed = platform.store.registry(platform.source.id).await?;
    let names: Vec<_> = listed.partitions.iter().map(|one| one.relation.table.to_string()).collect();
    assert_eq!(names, ["one", "two", "three"]);

    // One that was set back is drift, and mended by another PUT.
    platform.sql(&format!("alter table \"{}\".one replica identity default", tenant.schema)).await?;
    assert_eq!(get(&platform, &tenant, "root").await?.body["drift"], true);
    let mended = put(&platform, &tenant, "root", true).await?;
    assert_eq!((&mended.body["drift"], identities().await?), (&json!(false), "fff".to_owned()));

    assert_eq!(put(&platform, &tenant, "root", false).await?.status, StatusCode::OK);
    assert_eq!(identities().await?, "nif", "the one that is live itself stays");
    assert_eq!(put(&platform, &tenant, "three", false).await?.status, StatusCode::OK);
    assert_eq!(identities().await?, "nid");
    platform.stop().await
}

/// R-REG-4: whoever owns the partitions is given the statements for them, not one on the root, which would change nothing.
#[tokio::test]
async fn r_reg_4_the_owner_of_partitions_is_given_the_statements_for_them() -> Result<()> {
    let platform = Platform::start_without_superuser().await?;
    let tenant = platform.tenant("demo").await?;
    let sql = "create table s.root (id int) partition by list (id);
        create table s.one partition of s.root for values in (1);
        create table s.two partition of s.root for values in (2);
        alter table s.two replica identity full; create role stranger; alter table s.one owner to stranger;
        alter table s.root owner to stranger";
    platform.sql(&sql.replace("s.", &format!("\"{}\".", tenant.schema))).await?;
    let refused = put(&platform, &tenant, "root", true).await?;
    let expected = format!("ALTER TABLE \"{}\".\"one\" REPLICA IDENTITY FULL;", tenant.schema);
    assert_eq!((refused.status, refused.code()), (StatusCode::CONFLICT, "not_table_owner"), "{}", refused.body);
    assert_eq!(refused.body["sql"], expected);
    platform.stop().await
}
