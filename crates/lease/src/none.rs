use std::time::Duration;

use async_trait::async_trait;
use aura_domain::WorkerId;

use crate::{Claim, Holder, LeaseBackend, LeaseError};

/// Always leading: for one worker only, in development. Production refuses it with more than one worker registered.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLease;

#[async_trait]
impl LeaseBackend for NoLease {
    fn is_exclusive(&self) -> bool {
        false
    }

    async fn try_acquire(
        &self,
        name: &str,
        holder: &WorkerId,
        duration: Duration,
    ) -> Result<Option<Claim>, LeaseError> {
        Ok(Some(Claim { name: name.to_owned(), holder: holder.clone(), version: 1, duration }))
    }

    async fn renew(&self, _claim: &Claim) -> Result<bool, LeaseError> {
        Ok(true)
    }

    async fn release(&self, _claim: Claim) -> Result<(), LeaseError> {
        Ok(())
    }

    async fn holder(&self, _name: &str) -> Result<Option<Holder>, LeaseError> {
        Ok(None)
    }
}
