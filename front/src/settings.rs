use std::time::Duration;

use aura_auth::Verifier;
use aura_domain::FrontId;
use aura_kit::http::Origins;

/// What can be set about a front. The defaults are those of requirements R-FRT-2 and design §10.
#[derive(Debug, Clone)]
pub struct FrontSettings {
    /// Name of this process on the bus, unique per start.
    pub front_id: FrontId,
    /// Verifies keys and tokens; clones share what they know of projects' key sets.
    pub verifier: Verifier,
    /// Longest wait of a join reply for its subscriptions; clients give up at 10 s.
    pub join_hold: Duration,
    /// Clients of a live channel hear of an engine that doesn't stream after so long; a fail-over is shorter.
    pub interruption: Duration,
    /// Bytes that may wait for one socket before it is closed as too slow.
    pub queue_bytes: usize,
    /// Largest frame that a client may send, in bytes.
    pub frame_bytes: usize,
    /// Channels per socket.
    pub channels: usize,
    /// `postgres_changes` bindings per channel.
    pub bindings: usize,
    /// A socket without any inbound frame for so long is closed.
    pub idle: Duration,
    /// Longest write to a socket.
    pub write_timeout: Duration,
    /// Time between two comments on an idle event stream.
    pub sse_comment: Duration,
    /// Time between two heartbeats to the workers.
    pub heartbeat: Duration,
    /// Web pages that may open sockets and streams.
    pub origins: Origins,
}

impl Default for FrontSettings {
    fn default() -> Self {
        Self {
            front_id: FrontId(format!("front-{}", uuid::Uuid::new_v4().simple())),
            verifier: Verifier::default(),
            join_hold: Duration::from_secs(8),
            interruption: Duration::from_secs(10),
            queue_bytes: 1 << 20,
            frame_bytes: 256 << 10,
            channels: 100,
            bindings: 32,
            idle: Duration::from_secs(60),
            write_timeout: Duration::from_secs(10),
            sse_comment: Duration::from_secs(15),
            heartbeat: Duration::from_secs(5),
            origins: Origins::any(),
        }
    }
}
