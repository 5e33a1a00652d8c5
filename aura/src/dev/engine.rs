//! Whether changes flow, and what to do if they don't.

use std::time::Duration;

use aura_domain::EngineState;
use aura_worker::{EngineStatus, WorkerStatus};
use tokio::time::{Instant, sleep};

/// An engine starts well within this, if nothing is wrong.
const START_TIMEOUT: Duration = Duration::from_secs(3);
/// Between two looks.
const POLL: Duration = Duration::from_millis(20);

/// Waits until the engine streams (`None`), has failed, or should have started: one line with the reason and a fix.
pub(crate) async fn not_streaming(worker: &WorkerStatus) -> Option<String> {
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        let engines = worker.engines();
        let idle = engines.values().find(|engine| !engine.cdc_active);
        match idle {
            None if !engines.is_empty() => return None,
            Some(engine) if engine.state == EngineState::Failed || Instant::now() > deadline => {
                return Some(line(engine));
            }
            None if Instant::now() > deadline => {
                return Some("no engine has started: see the log (--log info)".to_owned());
            }
            _ => sleep(POLL).await,
        }
    }
}

fn line(engine: &EngineStatus) -> String {
    let reason = engine.reason.as_deref().unwrap_or("starting");
    format!(
        "no changes are delivered: the engine is {} ({reason}); {}",
        engine.state,
        fix(engine.code.unwrap_or_default())
    )
}

/// For the reasons that a person can do something about.
fn fix(code: &str) -> &'static str {
    match code {
        "plugin_missing" => {
            "apt-get install postgresql-<version>-wal2json on the server, list it in output_plugin_libraries if the \
             server has that setting, or use --plugin auto"
        }
        "waiting_for_transactions" => {
            "end the transactions that were open: select pid, query from pg_stat_activity where backend_xid is not null"
        }
        "slot_in_use_by_other" => "end who reads it: select slot_name, active_pid from pg_replication_slots",
        "standby" => "another process leads; if that one was killed, its lease expires within 15 s",
        "wal_level" | "wal_level_not_logical" => "alter system set wal_level = logical, then restart PostgreSQL",
        _ => "it is tried again; more is in the log (--log info)",
    }
}
