//! What we write into a Lease and read of it.

use std::{collections::BTreeMap, time::Duration};

use aura_domain::WorkerId;
use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use sha2::{Digest, Sha256};

/// On every lease of ours, for lists and watches.
pub(super) const LABEL: (&str, &str) = ("app.kubernetes.io/managed-by", "aura-realtime");
/// The lease's readable name; the object's own is a hash of it.
const NAME: &str = "aura-realtime/lease";
/// Token of the acquisition, which all its renewals keep.
const ACQUISITION: &str = "aura-realtime/acquisition";
/// Token of the write: each differs from the one before, whatever the holder's clock says.
const WRITE: &str = "aura-realtime/write";

/// DNS-safe, whatever `name` is.
pub(super) fn object_name(prefix: &str, name: &str) -> String {
    let hash = Sha256::digest(name.as_bytes());
    let hex: String = hash.iter().take(12).map(|byte| format!("{byte:02x}")).collect();
    format!("{prefix}-{hex}")
}

pub(super) fn holder(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref()?.holder_identity.as_deref().filter(|holder| !holder.is_empty())
}

pub(super) fn acquisition(lease: &Lease) -> Option<i64> {
    annotation(lease, ACQUISITION)?.parse().ok()
}

/// Which write of ours this state is.
pub(super) fn write_token(lease: &Lease) -> Option<&str> {
    annotation(lease, WRITE)
}

/// As the holder published it.
pub(super) fn duration(lease: &Lease) -> Option<Duration> {
    let seconds = lease.spec.as_ref()?.lease_duration_seconds?;
    u64::try_from(seconds).ok().map(Duration::from_secs)
}

/// Position in the cluster's history; `None` if the server's versions aren't numbers.
pub(super) fn version(lease: &Lease) -> Option<u64> {
    lease.metadata.resource_version.as_ref()?.parse().ok()
}

/// Whether the acquisition `token` by `worker` is what the lease says.
pub(super) fn is_held_by(lease: &Lease, worker: &WorkerId, token: i64) -> bool {
    holder(lease) == Some(worker.0.as_str()) && acquisition(lease) == Some(token)
}

/// Whether two states of a lease are the same to whoever waits for a change.
pub(super) fn same(left: &Lease, right: &Lease) -> bool {
    left.metadata.uid == right.metadata.uid
        && left.spec == right.spec
        && acquisition(left) == acquisition(right)
        && write_token(left) == write_token(right)
}

/// A lease in the hands of `worker`, from what was there before. Uid and resourceVersion go along: the write is conditional.
pub(super) fn taken(before: Option<&Lease>, object: &str, claim: &crate::Claim, now: Timestamp) -> Lease {
    let mut lease = before.cloned().unwrap_or_else(|| Lease {
        metadata: ObjectMeta { name: Some(object.to_owned()), ..ObjectMeta::default() },
        spec: None,
    });
    lease.metadata.managed_fields = None;
    labels(&mut lease).insert(LABEL.0.to_owned(), LABEL.1.to_owned());
    annotate(&mut lease, NAME, claim.name.clone());
    annotate(&mut lease, ACQUISITION, claim.version.to_string());
    mark(&mut lease);
    let transitions = before.and_then(|lease| lease.spec.as_ref()?.lease_transitions);
    lease.spec = Some(LeaseSpec {
        acquire_time: Some(MicroTime(now)),
        holder_identity: Some(claim.holder.0.clone()),
        lease_duration_seconds: Some(whole_seconds(claim.duration)),
        lease_transitions: Some(transitions.map_or(0, |count| count.saturating_add(1))),
        renew_time: Some(MicroTime(now)),
        ..LeaseSpec::default()
    });
    lease
}

/// The same lease, renewed.
pub(super) fn renewed(mut lease: Lease, now: Timestamp) -> Lease {
    mark(&mut lease);
    lease.metadata.managed_fields = None;
    lease.spec.get_or_insert_default().renew_time = Some(MicroTime(now));
    lease
}

/// The same lease in nobody's hands.
pub(super) fn freed(mut lease: Lease, now: Timestamp) -> Lease {
    lease.metadata.managed_fields = None;
    lease.metadata.annotations.get_or_insert_default().remove(ACQUISITION);
    let spec = lease.spec.get_or_insert_default();
    (spec.holder_identity, spec.renew_time) = (None, Some(MicroTime(now)));
    lease
}

fn mark(lease: &mut Lease) {
    annotate(lease, WRITE, format!("{:016x}", rand::random::<u64>()));
}

/// Rounded up: a holder that stops by the exact duration stops early enough.
fn whole_seconds(duration: Duration) -> i32 {
    let seconds = duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0));
    i32::try_from(seconds).unwrap_or(i32::MAX).max(1)
}

fn annotation<'a>(lease: &'a Lease, key: &str) -> Option<&'a str> {
    lease.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

fn annotate(lease: &mut Lease, key: &str, value: String) {
    lease.metadata.annotations.get_or_insert_default().insert(key.to_owned(), value);
}

fn labels(lease: &mut Lease) -> &mut BTreeMap<String, String> {
    lease.metadata.labels.get_or_insert_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_dns_labels_and_differ() {
        let name = object_name("aura", "source-Ä/b c");
        assert_eq!(name.len(), "aura-".len() + 24);
        assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-'), "{name}");
        assert_ne!(name, object_name("aura", "source-Ä/b d"));
    }

    #[test]
    fn a_published_duration_is_never_shorter_than_the_holders() {
        assert_eq!(whole_seconds(Duration::from_millis(1)), 1);
        assert_eq!(whole_seconds(Duration::from_millis(2001)), 3);
        assert_eq!(whole_seconds(Duration::from_secs(15)), 15);
        assert_eq!(whole_seconds(Duration::MAX), i32::MAX);
    }
}
