use std::{collections::VecDeque, time::Duration};

/// What goes wrong with a client's request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It takes so long before it is applied.
    Delay(Duration),
    /// It never arrives, and nothing is answered.
    Drop,
    /// It is applied and its answer never arrives: the ambiguous write.
    ApplyAndDrop,
    /// 429 with Retry-After.
    TooManyRequests,
    /// 500; not applied.
    ServerError,
    /// 401; not applied.
    Unauthorized,
}

/// Which requests of a client a fault is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum On {
    /// GET of one object.
    Get,
    /// Lists and watches.
    List,
    /// POST, PUT, PATCH, DELETE.
    Write,
    /// All.
    Any,
}

impl On {
    fn covers(self, kind: Self) -> bool {
        self == Self::Any || self == kind
    }
}

/// One client's faults.
#[derive(Debug, Default)]
pub(super) struct Faults {
    always: Vec<(On, Fault)>,
    once: VecDeque<(On, Fault)>,
    /// Lists are answered with the state at this revision's time.
    pub(super) stale_list: Option<super::objects::Objects>,
    /// Requests so far, by kind.
    pub(super) seen: Vec<On>,
}

impl Faults {
    pub(super) fn fail(&mut self, on: On, fault: Fault) {
        self.always.push((on, fault));
    }

    pub(super) fn once(&mut self, on: On, fault: Fault) {
        self.once.push_back((on, fault));
    }

    pub(super) fn heal(&mut self) {
        self.always.clear();
        self.once.clear();
        self.stale_list = None;
    }

    /// The faults of one request.
    pub(super) fn of(&mut self, kind: On) -> Vec<Fault> {
        self.seen.push(kind);
        let once = self.once.iter().position(|(on, _)| on.covers(kind)).and_then(|at| self.once.remove(at));
        let always = self.always.iter().copied();
        always.chain(once).filter(|(on, _)| on.covers(kind)).map(|(_, fault)| fault).collect()
    }
}
