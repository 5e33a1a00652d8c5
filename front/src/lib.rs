//! The front: Supabase Realtime's wire over WebSocket and an event stream over HTTP, fed by the bus (design §10).

mod clock;
mod departure;
mod front;
mod hub;
mod identity;
mod orders;
mod outbox;
mod query;
mod registrar;
mod request;
mod settings;
mod sink;
mod socket;
mod sse;
mod store_auth;
mod subscription;
mod told;

pub use front::{Front, FrontDeps};
pub use identity::{Authenticator, Identity, TokenError};
pub use settings::FrontSettings;
