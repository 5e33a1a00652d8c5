//! Keys that were good once.

use anyhow::Result;
use axum::http::{Method, StatusCode};

use crate::harness::Platform;

#[tokio::test]
async fn a_revoked_key_is_refused() -> Result<()> {
    let platform = Platform::start().await?;
    let own = platform.tenant("own").await?;
    let path = format!("/v1/db/{}/schema/tables", own.id);
    assert_eq!(platform.call(Method::GET, &path).key(&own.service).send().await?.status, StatusCode::OK);
    let client = platform.postgres.client("platform").await?;
    client.execute("update aura.keys set revoked_at = now()", &[]).await?;
    let reply = platform.call(Method::GET, &path).key(&own.service).send().await?;
    assert_eq!((reply.status, reply.code()), (StatusCode::UNAUTHORIZED, "key_revoked"));
    platform.stop().await
}
