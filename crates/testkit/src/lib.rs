//! Real parts for tests: throw-away PostgreSQL clusters and NATS servers, a TCP proxy that breaks connections, our own
//! binaries as child processes, and waiting on predicates. Everything dies with the test process and leaves no files.

mod dirs;
mod http;
mod kubernetes;
mod nats;
mod postgres;
mod process;
mod proxy;
mod slots;
mod squatter;
mod template;
mod wait;

pub use http::{http_get, http_status};
pub use kubernetes::{ClientSwitches, FakeKubernetes, Fault, On, ServedKubernetes};
pub use nats::{Nats, NatsOptions};
pub use postgres::{Postgres, PostgresOptions, Shutdown};
pub use process::{Process, ProcessOptions, children_of, is_running};
pub use proxy::{Flow, TcpProxy};
pub use rustix::process::Signal;
pub use slots::{SlotState, SlotWatch};
pub use squatter::{Squatter, SquatterOptions};
pub use wait::{eventually, eventually_some};

/// A TCP port of the loopback interface that was free a moment ago.
pub fn free_port() -> anyhow::Result<u16> {
    Ok(std::net::TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port())
}

/// The root of the repository, where `migrations/` and `tests/clients` are.
pub fn repository_root() -> std::path::PathBuf {
    // Cargo's word at run time, if there is one: clones that share a target directory share what is compiled in, too.
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let root = std::path::Path::new(&package).ancestors().find(|dir| dir.join("Cargo.lock").exists());
    root.map_or_else(|| package.clone().into(), std::path::Path::to_path_buf)
}
