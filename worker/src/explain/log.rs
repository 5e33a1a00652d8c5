//! The log switch: whose verdicts are logged, one line per (change, subscription), without a row's values.

use std::{collections::HashSet, str::FromStr};

use aura_domain::{ParseIdError, ProjectId};

/// `CDC_EXPLAIN`: nobody's (empty), everybody's (`all`), or those of some projects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ExplainLog {
    /// Nothing is logged.
    #[default]
    Off,
    /// These projects' verdicts.
    Projects(HashSet<ProjectId>),
    /// Every verdict.
    All,
}

impl ExplainLog {
    /// Whether a project's verdicts are logged.
    pub(crate) fn wants(&self, project: ProjectId) -> bool {
        match self {
            Self::Off => false,
            Self::Projects(some) => some.contains(&project),
            Self::All => true,
        }
    }
}

impl FromStr for ExplainLog {
    type Err = ParseIdError;

    fn from_str(text: &str) -> Result<Self, ParseIdError> {
        match text.trim() {
            "" => Ok(Self::Off),
            "all" => Ok(Self::All),
            some => some.split(',').map(|id| id.trim().parse()).collect::<Result<_, _>>().map(Self::Projects),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_s_everybody_s_or_some_projects() {
        let (a, b) = (ProjectId(uuid::Uuid::from_u128(1)), ProjectId(uuid::Uuid::from_u128(2)));
        let wants = |text: &str| text.parse::<ExplainLog>().map(|log| [log.wants(a), log.wants(b)]).ok();
        assert_eq!(wants(""), Some([false, false]));
        assert_eq!(wants("all"), Some([true, true]));
        assert_eq!(wants(&format!("{a}")), Some([true, false]));
        assert_eq!(wants(&format!("{b}, {a}")), Some([true, true]));
        assert_eq!(wants("everybody"), None);
    }
}
