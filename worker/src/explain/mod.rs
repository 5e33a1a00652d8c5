//! Why a subscription did or did not get a change: answers the api's questions (design §6) from what the engine remembers
//! and what the source says now. It delivers nothing and decides nothing that is delivered.

mod claims;
mod filter;
mod log;
mod recent;
mod row;
mod said;
mod steps;
mod verdict;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use aura_bus::{BusError, Message, Subject};
use aura_domain::{
    ProjectId,
    explain::{Answer, Question},
};
pub use log::ExplainLog;
pub(crate) use recent::{Fate, Recent};
pub(crate) use said::error;
use tokio::{
    sync::{Semaphore, watch},
    time::timeout,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{engine::report::Covered, subs::control::Control};

/// Questions that are answered at once, a project's one at a time: each takes a visibility connection (R-RLS-9).
const AT_ONCE: usize = 2;
/// One question, whatever it waits for; the api waits a little longer.
const LIMIT: Duration = Duration::from_secs(12);
/// Between two tries to subscribe.
const AGAIN: Duration = Duration::from_millis(500);

/// Answers questions about one engine.
pub(crate) struct Explainer {
    pub(crate) control: Arc<Control>,
    pub(crate) recent: Arc<Recent>,
    /// What the running filter covers.
    pub(crate) covered: watch::Receiver<Option<Arc<Covered>>>,
    asking: Mutex<HashSet<ProjectId>>,
    permits: Semaphore,
}

/// One project's question.
struct Turn<'a> {
    project: ProjectId,
    explainer: &'a Explainer,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.explainer.asking.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.project);
    }
}

impl Explainer {
    pub(crate) fn new(
        control: Arc<Control>,
        recent: Arc<Recent>,
        covered: watch::Receiver<Option<Arc<Covered>>>,
    ) -> Self {
        Self { control, recent, covered, asking: Mutex::default(), permits: Semaphore::new(AT_ONCE) }
    }

    /// Answers until `stop`.
    pub(crate) async fn serve(self, stop: CancellationToken) {
        let explainer = Arc::new(self);
        let serving = async {
            loop {
                if let Err(error) = explainer.serve_once().await {
                    tracing::debug!(source = %explainer.control.source, %error, "can't take questions, trying again");
                }
                tokio::time::sleep(AGAIN).await;
            }
        };
        stop.run_until_cancelled(serving).await;
    }

    async fn serve_once(self: &Arc<Self>) -> Result<(), BusError> {
        let mut questions = self.control.bus.subscribe(&Subject::explain(self.control.source)).await?;
        // A panic over one question ends with it; what is under way ends with this task.
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let _stop = stop.clone().drop_guard();
        while let Some(question) = questions.next().await {
            let (explainer, stop) = (Arc::clone(self), stop.clone());
            tasks.spawn(async move { stop.run_until_cancelled(explainer.reply(question)).await });
        }
        Ok(())
    }

    async fn reply(&self, message: Message) {
        let Some(reply_to) = message.reply else { return };
        let Ok(question) = serde_json::from_slice::<Question>(&message.payload) else {
            metrics::counter!("cdc_control_malformed_total").increment(1);
            return;
        };
        metrics::counter!("cdc_explain_total").increment(1);
        let answer = self.answer(&question).await;
        let payload = serde_json::to_vec(&answer).expect("an answer has string keys only");
        if let Err(error) = self.control.bus.publish(Message::new(reply_to, payload)).await {
            tracing::warn!(source = %self.control.source, %error, "an explanation could not be sent");
        }
    }

    async fn answer(&self, question: &Question) -> Answer {
        let Some(_turn) = self.turn(question.subscription.project) else { return Answer::Busy };
        let Ok(_permit) = self.permits.try_acquire() else { return Answer::Busy };
        match timeout(LIMIT, self.explain(question)).await {
            Ok(explanation) => Answer::Explained(explanation),
            Err(_) => Answer::Late,
        }
    }

    fn turn(&self, project: ProjectId) -> Option<Turn<'_>> {
        let first = self.asking.lock().unwrap_or_else(PoisonError::into_inner).insert(project);
        first.then(|| Turn { project, explainer: self })
    }
}
