use std::time::Instant;

use aura_domain::{Lsn, ProjectId};

use crate::{Owner, quota::Reservation, resolved::RowClaim};

/// Room for a row: its memory and its claim on the position, which only [`Reader::admit`](crate::Reader::admit) gives.
#[derive(Debug)]
pub struct Admission {
    pub(crate) owner: Owner,
    pub(crate) claim: RowClaim,
    pub(crate) memory: Reservation,
    pub(crate) at: Instant,
}

/// A row on its way to the bus. Dropping it gives its memory back and leaves its claim open, so that it comes again.
#[derive(Debug)]
pub struct Row<T> {
    /// What is delivered.
    pub body: T,
    admission: Admission,
}

impl Admission {
    /// The row that it was given for.
    pub fn carry<T>(self, body: T) -> Row<T> {
        Row { body, admission: self }
    }

    /// Number of the shard that takes the row.
    pub fn shard(&self) -> usize {
        self.owner.shard
    }

    /// The loss of the row was announced.
    pub fn ack(self) {
        self.claim.ack();
    }
}

impl<T> Row<T> {
    /// Tenant.
    pub fn project(&self) -> ProjectId {
        self.admission.owner.project
    }

    /// The row's LSN.
    pub fn lsn(&self) -> Lsn {
        self.admission.claim.lsn()
    }

    /// When it was read.
    pub fn at(&self) -> Instant {
        self.admission.at
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> usize {
        self.admission.memory.bytes()
    }

    /// Memory of the same quota, nothing yet: what a batch grows by (R-MEM-2).
    pub fn growth(&self) -> Reservation {
        self.admission.memory.empty()
    }

    /// See [`RowClaim::lead`].
    pub(crate) fn lead(&self) {
        self.admission.claim.lead();
    }

    /// The bus has it, or its loss was announced.
    pub(crate) fn ack(self) {
        self.admission.claim.ack();
    }
}
