//! Why a process can't go on: which component, and the reason.

use std::any::Any;

/// A component that failed. The last log line and the orchestrator's termination message say both.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{component}: {reason}")]
pub struct Failure {
    /// Which part of the process, such as `bus`.
    pub component: String,
    /// In words, causes included; never a secret.
    pub reason: String,
}

impl Failure {
    /// A failure of `component`.
    pub fn new(component: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { component: component.into(), reason: reason.into() }
    }

    /// A panic in `component`.
    pub(crate) fn of_panic(component: &str, panic: &(dyn Any + Send)) -> Self {
        let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref().copied());
        Self::new(component, format!("panicked: {}", text.unwrap_or("without words")))
    }

    /// From an error that may or may not say which component it is about.
    pub(crate) fn of(error: anyhow::Error) -> Self {
        error.downcast().unwrap_or_else(|error| Self::new("process", with_causes(&error)))
    }
}

/// Names the component that an error is about.
pub trait Component<T> {
    /// The same, the error with `component`'s name.
    ///
    /// # Errors
    /// As before.
    fn component(self, component: &'static str) -> Result<T, Failure>;
}

impl<T, E: Into<anyhow::Error>> Component<T> for Result<T, E> {
    fn component(self, component: &'static str) -> Result<T, Failure> {
        self.map_err(|error| Failure::new(component, with_causes(&error.into())))
    }
}

/// The error and its causes in one line. Messages of some libraries hold their cause's message: it is said once.
pub fn with_causes(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        let inner = anyhow!("password authentication failed");
        let outer: anyhow::Result<()> = Err(inner).context("database: password authentication failed").context("start");
        let error = outer.context("dev").expect_err("an error");
        assert_eq!(with_causes(&error), "dev: start: database: password authentication failed");
    }

    #[test]
    fn an_error_keeps_the_component_it_was_given() {
        let named: Result<(), _> = Err(anyhow!("refused")).context("can't connect").component("bus");
        let failure = Failure::of(anyhow::Error::from(named.expect_err("an error")));
        assert_eq!(failure, Failure::new("bus", "can't connect: refused"));
        assert_eq!(Failure::of(anyhow!("odd")), Failure::new("process", "odd"));
    }
}
