//! What a Kubernetes API server does with Leases, row by row: read off a real one, and what the fake one is held to. With
//! `AURA_TEST_KUBECONFIG` it is asked of the server that this names.

use std::time::Duration;

use aura_testkit::{FakeKubernetes, Fault, On};
use futures_util::{StreamExt, TryStreamExt, future::join_all};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Error,
    api::{DeleteParams, ListParams, Patch, PatchParams, PostParams, Preconditions, WatchEvent, WatchParams},
};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout};

use crate::server::Server;

const SOON: Duration = Duration::from_secs(10);

/// A lease of a fresh name on a server.
struct Scene {
    _server: Server,
    api: Api<Lease>,
    name: String,
}

impl Scene {
    async fn start() -> Self {
        let server = Server::start().await;
        let api = server.api("contract").await;
        Self { _server: server, api, name: format!("contract-{}", uuid::Uuid::new_v4().simple()) }
    }

    fn lease(&self, spec: Value) -> Lease {
        let body = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease",
            "metadata": {"name": self.name, "labels": {"test": self.name}}, "spec": spec});
        serde_json::from_value(body).expect("a lease")
    }

    async fn create(&self) -> Lease {
        self.api.create(&PostParams::default(), &self.lease(json!({"holderIdentity": "a"}))).await.expect("created")
    }

    async fn replace(&self, lease: &Lease) -> Result<Lease, Error> {
        self.api.replace(&self.name, &PostParams::default(), lease).await
    }

    async fn merge(&self, patch: Value) -> Result<Lease, Error> {
        self.api.patch(&self.name, &PatchParams::default(), &Patch::Merge(patch)).await
    }

    async fn delete(&self) {
        self.api.delete(&self.name, &DeleteParams::default()).await.expect("deleted");
    }
}

fn with_holder(lease: &Lease, holder: &str) -> Lease {
    let mut lease = lease.clone();
    lease.spec.get_or_insert_default().holder_identity = Some(holder.to_owned());
    lease
}

fn version(lease: &Lease) -> u64 {
    lease.metadata.resource_version.as_ref().expect("a version").parse().expect("a number")
}

/// Code and reason of the refusal.
fn refusal<T: std::fmt::Debug>(outcome: Result<T, Error>) -> (u16, String) {
    match outcome {
        Err(Error::Api(status)) => (status.code, status.reason),
        other => panic!("a refusal, not {other:?}"),
    }
}

fn conflict() -> (u16, String) {
    (409, "Conflict".to_owned())
}

#[tokio::test]
async fn post_creates_only() {
    let scene = Scene::start().await;
    assert_eq!(refusal(scene.api.get(&scene.name).await), (404, "NotFound".to_owned()));
    let lease = scene.create().await;
    assert!(lease.metadata.uid.is_some() && version(&lease) > 0);
    let again = scene.api.create(&PostParams::default(), &scene.lease(json!({}))).await;
    assert_eq!(refusal(again), (409, "AlreadyExists".to_owned()));
    scene.delete().await;
}

#[tokio::test]
async fn put_is_conditional_on_the_version() {
    let scene = Scene::start().await;
    let first = scene.create().await;
    let second = scene.replace(&with_holder(&first, "b")).await.expect("the current version");
    assert!(version(&second) > version(&first));
    assert_eq!(refusal(scene.replace(&with_holder(&first, "c")).await), conflict());
    let mut unconditional = with_holder(&second, "c");
    unconditional.metadata.resource_version = None;
    assert_eq!(refusal(scene.replace(&unconditional).await), (422, "Invalid".to_owned()));
    let same = scene.replace(&second).await.expect("no change");
    assert_eq!(version(&same), version(&second));
    scene.delete().await;
}

#[tokio::test]
async fn put_on_a_missing_object_creates_it_unless_it_names_a_uid() {
    let scene = Scene::start().await;
    for made_up in [None, Some("17")] {
        let mut lease = scene.lease(json!({"holderIdentity": "a"}));
        lease.metadata.resource_version = made_up.map(str::to_owned);
        scene.replace(&lease).await.expect("created");
        scene.delete().await;
    }
    let old = scene.create().await;
    scene.delete().await;
    assert_eq!(refusal(scene.replace(&old).await), conflict(), "gone");
    let new = scene.create().await;
    assert_eq!(refusal(scene.replace(&old).await), conflict(), "made anew");
    let mut mixed = old.clone();
    mixed.metadata.resource_version = new.metadata.resource_version.clone();
    assert_eq!(refusal(scene.replace(&mixed).await), conflict(), "the right version of another object");
    scene.delete().await;
}

#[tokio::test]
async fn a_merge_patch_is_conditional_only_if_it_says_so() {
    let scene = Scene::start().await;
    let first = scene.create().await;
    let patched = scene.merge(json!({"spec": {"holderIdentity": "b"}})).await.expect("last writer wins");
    assert_eq!(patched.spec.expect("a spec").holder_identity.as_deref(), Some("b"));
    let stale =
        json!({"metadata": {"resourceVersion": first.metadata.resource_version}, "spec": {"holderIdentity": "c"}});
    assert_eq!(refusal(scene.merge(stale).await), conflict());
    scene.delete().await;
}

#[tokio::test]
async fn server_side_apply_respects_owners_unless_forced() {
    let scene = Scene::start().await;
    let apply = async |manager: &str, holder: &str, force: bool| {
        let params = PatchParams { field_manager: Some(manager.to_owned()), force, ..PatchParams::default() };
        let body = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": scene.name},
            "spec": {"holderIdentity": holder}});
        scene.api.patch(&scene.name, &params, &Patch::Apply(body)).await
    };
    apply("one", "a", false).await.expect("created");
    match apply("two", "b", false).await {
        Err(Error::Api(status)) => {
            assert_eq!(status.code, 409);
            assert!(status.message.contains(".spec.holderIdentity"), "{}", status.message);
        }
        other => panic!("{other:?}"),
    }
    apply("two", "a", false).await.expect("the same value");
    apply("two", "b", true).await.expect("forced");
    scene.delete().await;
}

#[tokio::test]
async fn delete_is_conditional_if_it_says_so_and_versions_go_on_rising() {
    let scene = Scene::start().await;
    let first = scene.create().await;
    let second = scene.replace(&with_holder(&first, "b")).await.expect("replaced");
    let resource_version = first.metadata.resource_version.clone();
    let stale = DeleteParams::default().preconditions(Preconditions { resource_version, uid: None });
    assert_eq!(refusal(scene.api.delete(&scene.name, &stale).await), conflict());
    scene.delete().await;
    let again = scene.create().await;
    assert!(version(&again) > version(&second) && again.metadata.uid != second.metadata.uid);
    assert_eq!(again.spec.expect("a spec").lease_transitions, None, "starts anew");
    scene.delete().await;
}

#[tokio::test]
async fn the_spec_is_validated_and_kept() {
    let scene = Scene::start().await;
    for wrong in [json!({"leaseDurationSeconds": 0}), json!({"leaseTransitions": -1})] {
        let created = scene.api.create(&PostParams::default(), &scene.lease(wrong)).await;
        assert_eq!(refusal(created), (422, "Invalid".to_owned()));
    }
    let created = scene.create().await;
    assert_eq!(refusal(scene.merge(json!({"spec": {"leaseDurationSeconds": 0}})).await), (422, "Invalid".to_owned()));
    scene.replace(&with_holder(&created, "")).await.expect("nobody");
    let nobody = scene.merge(json!({"spec": {"holderIdentity": null}})).await.expect("nobody");
    assert_eq!(nobody.spec.expect("a spec").holder_identity, None);
    let dropped = scene.merge(json!({"spec": {"preferredHolder": "b"}})).await.expect("accepted");
    assert_eq!(dropped.spec.expect("a spec").preferred_holder, None, "and dropped silently");
    let time = "2026-11-29T12:34:56.789012Z";
    let kept = scene.merge(json!({"spec": {"renewTime": time}})).await.expect("accepted");
    let kept = serde_json::to_value(kept).expect("JSON");
    assert_eq!(kept["spec"]["renewTime"], json!(time), "to the microsecond");
    scene.delete().await;
}

#[tokio::test]
async fn of_sixteen_puts_one_wins_and_of_sixteen_blind_patches_all() {
    let scene = Scene::start().await;
    let lease = scene.create().await;
    let puts = (0..16).map(|n| {
        let (scene, lease) = (&scene, with_holder(&lease, &format!("w{n}")));
        async move { scene.replace(&lease).await }
    });
    let outcomes = join_all(puts).await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
    for outcome in outcomes.into_iter().filter(Result::is_err) {
        assert_eq!(refusal(outcome), conflict());
    }
    let patches = (0..16).map(|n| scene.merge(json!({"spec": {"holderIdentity": format!("w{n}")}})));
    assert!(join_all(patches).await.iter().all(Result::is_ok));
    scene.delete().await;
}

#[tokio::test]
async fn lists_and_watches_follow_the_label() {
    let scene = Scene::start().await;
    let selector = format!("test={}", scene.name);
    let before = scene.api.list(&ListParams::default().labels(&selector)).await.expect("a list");
    assert!(before.items.is_empty());
    let from = before.metadata.resource_version.expect("a version");
    let lease = scene.create().await;
    assert_eq!(scene.api.list(&ListParams::default().labels(&selector)).await.expect("a list").items.len(), 1);
    assert!(scene.api.list(&ListParams::default().labels("test=other")).await.expect("a list").items.is_empty());

    let params = WatchParams::default().labels(&selector).timeout(2);
    let mut watch = scene.api.watch(&params, &from).await.expect("a watch").boxed();
    let mut next = async || timeout(SOON, watch.try_next()).await.expect("in time").expect("an event");
    assert!(matches!(next().await, Some(WatchEvent::Added(_))));
    let replaced = scene.replace(&with_holder(&lease, "b")).await.expect("replaced");
    let Some(WatchEvent::Modified(seen)) = next().await else { panic!("a modification") };
    assert_eq!(seen.metadata.resource_version, replaced.metadata.resource_version);
    scene.delete().await;
    assert!(matches!(next().await, Some(WatchEvent::Deleted(_))));
    while let Some(event) = next().await {
        assert!(matches!(event, WatchEvent::Bookmark(_)), "{event:?}");
    }
}

#[tokio::test]
async fn a_watch_from_too_long_ago_is_told_so() {
    // Of the fake one alone: how long ago is too long can't be arranged with a real one.
    let fake = FakeKubernetes::new();
    let server = Server::Fake(fake.serve().await.expect("a port"));
    let scene = Scene { api: server.api("contract").await, _server: server, name: "old".to_owned() };
    let lease = scene.create().await;
    scene.replace(&with_holder(&lease, "b")).await.expect("replaced");
    fake.compact();
    let from = lease.metadata.resource_version.expect("a version");
    let mut watch = scene.api.watch(&WatchParams::default(), &from).await.expect("a watch").boxed();
    let Ok(Some(WatchEvent::Error(status))) = watch.try_next().await else { panic!("an error") };
    assert_eq!(status.code, 410);
}

#[tokio::test]
async fn the_fakes_switches_work_for_one_client_at_a_time() {
    let fake = FakeKubernetes::new();
    let server = Server::Fake(fake.serve().await.expect("a port"));
    let (victim, other) = (server.api("victim").await, server.api("other").await);
    let switches = fake.client("victim");
    let scene = Scene { api: victim.clone(), _server: server, name: "l".to_owned() };
    let lease = scene.create().await;
    let brief = Duration::from_millis(200);

    for (fault, code) in [(Fault::TooManyRequests, 429), (Fault::ServerError, 500), (Fault::Unauthorized, 401)] {
        switches.once(On::Write, fault);
        assert_eq!(refusal(scene.replace(&with_holder(&lease, "x")).await).0, code);
    }
    switches.once(On::Any, Fault::Delay(brief));
    let asked = Instant::now();
    assert_eq!(victim.get("l").await.expect("late").metadata.resource_version, lease.metadata.resource_version);
    assert!(asked.elapsed() >= brief);

    switches.once(On::Write, Fault::Drop);
    assert!(timeout(brief, scene.replace(&with_holder(&lease, "dropped"))).await.is_err());
    assert_eq!(version(&other.get("l").await.expect("unharmed")), version(&lease));
    switches.once(On::Write, Fault::ApplyAndDrop);
    assert!(timeout(brief, scene.replace(&with_holder(&lease, "ambiguous"))).await.is_err());
    assert!(version(&other.get("l").await.expect("unharmed")) > version(&lease));

    switches.stale_lists();
    other.delete("l", &DeleteParams::default()).await.expect("deleted");
    assert_eq!(victim.list(&ListParams::default()).await.expect("a list").items.len(), 1);
    assert!(other.list(&ListParams::default()).await.expect("a list").items.is_empty());
    switches.heal();
    assert!(victim.list(&ListParams::default()).await.expect("a list").items.is_empty());

    switches.freeze(true);
    assert!(timeout(brief, victim.get_opt("l")).await.is_err());
    assert!(other.get_opt("l").await.expect("unharmed").is_none());
    switches.heal();
    assert!(victim.get_opt("l").await.expect("thawed").is_none());

    let mut watch = victim.watch(&WatchParams::default().timeout(60), "0").await.expect("a watch").boxed();
    while !matches!(watch.try_next().await, Ok(Some(WatchEvent::Deleted(_)))) {}
    switches.cut_watches();
    let end = timeout(SOON, watch.try_next()).await.expect("at once");
    assert!(!matches!(end, Ok(Some(_))), "{end:?}");
    assert_eq!(fake.client("other").requests(On::Write), 1);
}
