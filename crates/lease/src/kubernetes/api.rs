//! Calls of the API server: each bounded, and told apart by what may have become of it.

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api,
    api::{ListParams, PostParams},
};
use tokio::time::timeout;

use super::record::LABEL;
use crate::LeaseError;

/// Longest call. The client itself would wait for ever, or try again behind our back.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a write gave no object back.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The object is another one, or has another version, than the write was for.
    Conflict,
    /// The server said no: nothing was changed.
    Refused(LeaseError),
    /// It may have been applied, now or later.
    Doubtful(LeaseError),
}

pub(super) async fn get(api: &Api<Lease>, object: &str) -> Result<Option<Lease>, LeaseError> {
    bounded(api.get_opt(object)).await?.map_err(backend)
}

/// Our leases, and the version of the list.
pub(super) async fn list(api: &Api<Lease>) -> Result<(Vec<Lease>, String), LeaseError> {
    let (key, value) = LABEL;
    let params = ListParams::default().labels(&format!("{key}={value}"));
    let list = bounded(api.list(&params)).await?.map_err(backend)?;
    Ok((list.items, list.metadata.resource_version.unwrap_or_default()))
}

/// PUT with the uid and version that the object has: refused if it was changed or made anew. Without a version it is a
/// POST: refused if there is one.
pub(super) async fn write(api: &Api<Lease>, object: &str, lease: &Lease) -> Result<Lease, WriteError> {
    let params = PostParams::default();
    let outcome = match &lease.metadata.resource_version {
        Some(_) => bounded(api.replace(object, &params, lease)).await,
        None => bounded(api.create(&params, lease)).await,
    };
    match outcome {
        Ok(Ok(lease)) => Ok(lease),
        Ok(Err(kube::Error::Api(status))) if status.code == 409 => Err(WriteError::Conflict),
        Ok(Err(kube::Error::Api(status))) if status.code < 500 => {
            Err(WriteError::Refused(backend(kube::Error::Api(status))))
        }
        Ok(Err(error)) => Err(WriteError::Doubtful(backend(error))),
        Err(timed_out) => Err(WriteError::Doubtful(timed_out)),
    }
}

pub(super) async fn bounded<T>(call: impl Future<Output = T>) -> Result<T, LeaseError> {
    timeout(CALL_TIMEOUT, call).await.map_err(|_| LeaseError::Timeout(CALL_TIMEOUT))
}

pub(super) fn backend(error: kube::Error) -> LeaseError {
    LeaseError::Backend(Box::new(error))
}
