use aura_domain::WorkerId;

/// The pod that a worker runs in, as the downward API tells it (`POD_NAME`, `POD_UID`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.uid`.
    pub uid: String,
}

/// A name for this start of a worker. In a pod it is `<pod name>_<pod uid>_<boot>`: a container that the kubelet starts again
/// is a new holder of the same pod. One worker per pod.
pub fn worker_id(pod: Option<&Pod>) -> WorkerId {
    let boot = rand::random::<u64>();
    match pod {
        // Neither a pod's name nor its uid has an underscore.
        Some(Pod { name, uid }) => WorkerId(format!("{name}_{uid}_{boot:016x}")),
        None => WorkerId(format!("worker-{:016x}{boot:016x}", rand::random::<u64>())),
    }
}

/// What all starts of the same pod have in common, with the last underscore; `None` outside a pod.
pub fn pod_prefix(worker: &WorkerId) -> Option<&str> {
    let boot = worker.0.rfind('_')?;
    let prefix = &worker.0[..=boot];
    (prefix.matches('_').count() == 2).then_some(prefix)
}

/// Whether `holder` is an earlier start of the pod that `worker` runs in: it is gone, so what it held is free.
pub fn is_predecessor(holder: &WorkerId, worker: &WorkerId) -> bool {
    holder != worker && pod_prefix(worker).is_some_and(|prefix| holder.0.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_of_a_pod_differ_and_have_its_prefix_in_common() {
        let pod = Pod { name: "aura-worker-7d9f-x2".to_owned(), uid: "0f9c1c50-11aa".to_owned() };
        let (first, second) = (worker_id(Some(&pod)), worker_id(Some(&pod)));
        assert_ne!(first, second);
        assert_eq!(pod_prefix(&first), Some("aura-worker-7d9f-x2_0f9c1c50-11aa_"));
        assert!(is_predecessor(&first, &second) && !is_predecessor(&first, &first));
        let other = worker_id(Some(&Pod { uid: "0f9c1c50-11ab".to_owned(), ..pod }));
        assert!(!is_predecessor(&first, &other) && !is_predecessor(&worker_id(None), &worker_id(None)));
        assert_eq!(pod_prefix(&worker_id(None)), None);
        assert_eq!(pod_prefix(&WorkerId("odd_name".to_owned())), None);
    }
}
