//! Where orders to sockets and streams come from: the api closes some of them, and what is accepted changes.

use std::{sync::Arc, time::Duration};

use aura_bus::{Message, Subject};
use aura_wire::control::Disconnect;
use tokio::time::timeout;

use crate::{front::Shared, hub::Order};

const SUBSCRIBE_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY: Duration = Duration::from_millis(250);

/// Passes orders on, until dropped.
pub(crate) async fn run(shared: &Shared) {
    let recheck = |project| shared.hubs.order(project, &Order::Recheck);
    tokio::join!(listen(shared), shared.auth.watch(&recheck));
}

async fn listen(shared: &Shared) {
    loop {
        match timeout(SUBSCRIBE_TIMEOUT, shared.bus.subscribe(&Subject::all_disconnects())).await {
            Ok(Ok(mut subscription)) => {
                while let Some(message) = subscription.next().await {
                    disconnect(shared, &message);
                }
            }
            Ok(Err(error)) => tracing::debug!(%error, "can't listen to the api yet"),
            Err(_) => tracing::debug!("subscribing to the api timed out"),
        }
        tokio::time::sleep(RETRY).await;
    }
}

fn disconnect(shared: &Shared, message: &Message) {
    match serde_json::from_slice::<Disconnect>(&message.payload) {
        Ok(order) if message.subject.project() == Some(order.project) => {
            shared.hubs.order(Some(order.project), &Order::Disconnect(Arc::new(order.target)));
        }
        _ => tracing::warn!("dropped a malformed order of the api"),
    }
}
