use aura_domain::{Epoch, Generation, Lsn, ProjectId, Relation, SqlName};
use aura_store::{Registration, RegistrationFilter, RegistrationStatus, ReplicaIdentity, StoreError, TableRef};
use uuid::Uuid;

use crate::{Platform, name, platform};

const FIRST: Generation = Generation(1);

async fn disable(platform: &Platform, project: ProjectId, table: &str, at: Lsn) -> Option<Registration> {
    let (schema, table) = (name("app"), name(table));
    let table = TableRef { project, schema: &schema, table: &table };
    platform.store.disable_table(table, at, "key 1 service_role", None).await.expect("disabled")
}

async fn covered(platform: &Platform) -> (i64, Vec<Registration>) {
    let snapshot = platform.store.registry(platform.source).await.expect("read");
    (snapshot.revision, snapshot.registrations)
}

#[tokio::test]
async fn r_reg_3_life_of_a_registration_on() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let intent = platform.enable(project, "Orders", 4_000_000_000).await;
    assert_eq!((intent.enabled, intent.status, intent.identity_set), (true, RegistrationStatus::Pending, false));
    assert_eq!((intent.oid, intent.revision, intent.enabled_at_lsn), (4_000_000_000, 1, None));
    assert_eq!(covered(&platform).await, (1, vec![intent.clone()]));

    let set = store.identity_set(intent.id, None, Lsn(0x1_0000_00A0), FIRST).await.expect("set");
    assert_eq!((set.identity_set, set.revision), (true, 2));
    assert_eq!((set.enabled_at_lsn, set.enabled_generation), (Some(Lsn(0x1_0000_00A0)), Some(FIRST)));
    assert_eq!(set.previous_identity, Some(ReplicaIdentity { kind: 'd', index: None }), "as the intent saw it");

    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    store.mark_active(platform.source, epoch, 2, &[(set.id, Lsn(0x1_0000_00B0))]).await.expect("marked");
    store.set_applied_revision(platform.source, epoch, 2).await.expect("applied");
    let active = store.registration_by_id(set.id).await.expect("read").expect("it exists");
    assert_eq!((active.status, active.active_since_lsn), (RegistrationStatus::Active, Some(Lsn(0x1_0000_00B0))));
    assert_eq!(active.revision, 2, "observing changes no desired state");
    assert_eq!(store.engine(platform.source).await.expect("read").map(|engine| engine.applied_revision), Some(2));
    // A restart of the engine covers it again from later on; nothing was lost in between.
    store.mark_active(platform.source, epoch, 2, &[(set.id, Lsn(0x1_0000_00C0))]).await.expect("marked");
    let still = store.registration_by_id(set.id).await.expect("read").expect("it exists");
    assert_eq!(still.active_since_lsn, Some(Lsn(0x1_0000_00B0)));
}

#[tokio::test]
async fn r_reg_1_repeating_changes_nothing_and_is_not_audited() {
    let platform = platform().await;
    let project = platform.project("p").await;
    let first = platform.enable(project, "t", 7).await;
    assert_eq!(platform.enable(project, "t", 7).await, first);
    let set = platform.store.identity_set(first.id, None, Lsn(10), FIRST).await.expect("set");
    let repaired = platform.store.identity_set(first.id, None, Lsn(99), Generation(3)).await.expect("again");
    assert_eq!(repaired, set, "drift repair moves neither LSN nor revision");
    assert_eq!(platform.enable(project, "t", 7).await, set);
    let off = disable(&platform, project, "t", Lsn(20)).await.expect("registered");
    assert_eq!(disable(&platform, project, "t", Lsn(30)).await, Some(off));
    assert_eq!(disable(&platform, project, "never", Lsn(30)).await, None);
    let audit = platform.store.audit_of_project(project, None, 10).await.expect("read");
    let actions: Vec<_> = audit.iter().map(|line| line.action.as_str()).collect();
    assert_eq!(actions, ["table.disable", "table.enable", "project.create"]);
    assert_eq!(audit[1].request_id.as_deref(), Some("req-1"));
    assert_eq!(audit[0].target, "app.t");
    assert_eq!(platform.store.audit_of_project(project, Some(audit[1].id), 10).await.expect("read").len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn r_reg_1_parallel_puts_leave_one_revision_and_one_audit_line() {
    let platform = platform().await;
    let project = platform.project("p").await;
    let all = futures_util::future::join_all((0..50).map(|_| platform.enable(project, "t", 7))).await;
    assert!(all.iter().all(|one| *one == all[0]));
    assert_eq!(covered(&platform).await.0, 1);
    assert_eq!(platform.store.audit_of_project(project, None, 10).await.expect("read").len(), 2);
}

#[tokio::test]
async fn r_reg_8_disabled_tables_stay_with_the_worker_until_confirmed() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    let off = disable(&platform, project, "t", Lsn(100)).await.expect("registered");
    assert_eq!((off.enabled, off.status, off.revision), (false, RegistrationStatus::Disabled, 3));
    assert_eq!((off.disabled_at_lsn, off.disabled_generation), (Some(Lsn(100)), Some(FIRST)));
    assert_eq!(off.active_since_lsn, None);
    assert_eq!(covered(&platform).await, (3, vec![off.clone()]), "rows from before are still to be published");
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    store.save_position(platform.source, epoch, FIRST, Lsn(99)).await.expect("saved");
    assert_eq!(covered(&platform).await.1.len(), 1);
    store.save_position(platform.source, epoch, FIRST, Lsn(100)).await.expect("saved");
    assert_eq!(covered(&platform).await, (3, vec![]));
    // The identity is restored later; what was there before is known until then, whatever happens in between.
    let seen = store.registration_by_id(off.id).await.expect("read").expect("it exists");
    assert_eq!(seen.previous_identity, Some(ReplicaIdentity { kind: 'd', index: None }));
    store.identity_restored(off.id).await.expect("restored");
    let restored = store.registration_by_id(off.id).await.expect("read").expect("it exists");
    assert_eq!((restored.identity_set, restored.previous_identity), (false, None));
}

#[tokio::test]
async fn r_reg_3_on_again_starts_anew() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    disable(&platform, project, "t", Lsn(100)).await.expect("registered");
    let again = platform.enable(project, "t", 7).await;
    assert_eq!((again.id, again.enabled, again.status), (on.id, true, RegistrationStatus::Pending));
    assert_eq!((again.identity_set, again.enabled_at_lsn, again.disabled_at_lsn), (false, None, None));
    assert_eq!(again.previous_identity, Some(ReplicaIdentity { kind: 'd', index: None }), "it was never restored");
    let set = store.identity_set(on.id, None, Lsn(200), FIRST).await.expect("set");
    assert_eq!(set.enabled_at_lsn, Some(Lsn(200)));
}

#[tokio::test]
async fn r_reg_2_a_new_table_of_the_name_goes_live_only_when_enabled_again() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    let missing = RegistrationStatus::Missing;
    store
        .mark_status(platform.source, epoch, (on.id, on.oid, &on.table), missing, Some("dropped"))
        .await
        .expect("marked");
    let seen = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!((seen.status, seen.reason.as_deref(), seen.oid), (missing, Some("dropped"), 7));
    let again = platform.enable(project, "t", 8).await;
    assert_eq!((again.oid, again.status, again.identity_set), (8, RegistrationStatus::Pending, false));
    assert_eq!((again.enabled_at_lsn, again.reason), (None, None));
    assert!(again.revision > seen.revision);
    store
        .mark_status(platform.source, epoch, (on.id, 7, &on.table), missing, Some("a late word"))
        .await
        .expect("not fenced");
    let kept = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!(kept.status, RegistrationStatus::Pending, "what was found of the old table says nothing of the new one");
}

#[tokio::test]
async fn r_reg_6_a_blocked_table_is_tried_again_with_what_its_alter_left() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    let set = store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    let blocked = RegistrationStatus::Blocked;
    store
        .mark_status(platform.source, epoch, (on.id, on.oid, &on.table), blocked, Some("refused by the plugin"))
        .await
        .expect("marked");
    let again = platform.enable(project, "t", 7).await;
    assert_eq!((again.status, again.reason, again.identity_set), (RegistrationStatus::Pending, None, true));
    assert_eq!(again.enabled_at_lsn, set.enabled_at_lsn);
}

#[tokio::test]
async fn r_lease_2_an_old_epoch_writes_nothing() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    let old = store.raise_epoch(platform.source).await.expect("raised");
    let new = store.raise_epoch(platform.source).await.expect("raised");
    assert_eq!(new, Epoch(old.0 + 1));
    let before = store.registration_by_id(on.id).await.expect("read");
    let active = store.mark_active(platform.source, old, 2, &[(on.id, Lsn(20))]).await;
    assert!(matches!(active, Err(StoreError::Fenced)), "{active:?}");
    let status =
        store.mark_status(platform.source, old, (on.id, on.oid, &on.table), RegistrationStatus::Missing, None).await;
    assert!(matches!(status, Err(StoreError::Fenced)), "{status:?}");
    let applied = store.set_applied_revision(platform.source, old, 2).await;
    assert!(matches!(applied, Err(StoreError::Fenced)), "{applied:?}");
    assert_eq!(store.registration_by_id(on.id).await.expect("read"), before);
    store.mark_active(platform.source, new, 2, &[(on.id, Lsn(20))]).await.expect("the new one may");
}

#[tokio::test]
async fn r_reg_3_what_changed_after_the_filter_was_made_is_not_called_active() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    let set = store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    disable(&platform, project, "t", Lsn(100)).await.expect("registered");
    store.mark_active(platform.source, epoch, set.revision, &[(on.id, Lsn(20))]).await.expect("not fenced");
    let off = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!(off.status, RegistrationStatus::Disabled);
    let again = platform.enable(project, "t", 7).await;
    store.identity_set(on.id, None, Lsn(200), FIRST).await.expect("set");
    store.mark_active(platform.source, epoch, again.revision, &[(on.id, Lsn(20))]).await.expect("not fenced");
    let pending = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!(pending.status, RegistrationStatus::Pending, "that filter was older than the ALTER");
}

#[tokio::test]
async fn listing_filters_and_pages_in_byte_order() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let other = platform.project("other").await;
    for (oid, table) in ["Orders", "we,ird. t'b*l", "quo\"te", "back\\slash", "orders_2", "🦀"].iter().enumerate() {
        platform.enable(project, table, oid as u32 + 1).await;
    }
    platform.enable(other, "orders", 1).await;
    disable(&platform, project, "orders_2", Lsn(1)).await.expect("registered");
    let list = async |filter: RegistrationFilter<'_>| {
        let rows = store.registrations_of_project(project, filter).await.expect("read");
        rows.into_iter().map(|row| row.table.to_string()).collect::<Vec<_>>()
    };
    let all = RegistrationFilter { limit: 100, ..Default::default() };
    let names = list(all).await;
    assert_eq!(names, ["Orders", "back\\slash", "orders_2", "quo\"te", "we,ird. t'b*l", "🦀"]);
    assert_eq!(list(RegistrationFilter { q: Some("ORDERS"), ..all }).await, ["Orders", "orders_2"]);
    assert_eq!(list(RegistrationFilter { enabled: Some(false), ..all }).await, ["orders_2"]);
    let page = RegistrationFilter { after: Some(("app", "back\\slash")), limit: 2, ..all };
    assert_eq!(list(page).await, ["orders_2", "quo\"te"]);
}

#[tokio::test]
async fn unknown_things_are_not_found() {
    let platform = platform().await;
    let store = &platform.store;
    let nowhere = aura_domain::SourceId(Uuid::new_v4());
    assert!(matches!(store.registry(nowhere).await, Err(StoreError::NotFound("source"))));
    assert!(matches!(store.raise_epoch(nowhere).await, Err(StoreError::NotFound("engine"))));
    let unknown = store.identity_set(Uuid::new_v4(), None, Lsn(1), FIRST).await;
    assert!(matches!(unknown, Err(StoreError::NotFound("registration"))), "{unknown:?}");
    assert_eq!(store.engine(nowhere).await.expect("read"), None);
}

#[tokio::test]
async fn r_reg_2_a_registration_follows_its_table() {
    let platform = platform().await;
    let store = &platform.store;
    let project = platform.project("p").await;
    let on = platform.enable(project, "t", 7).await;
    store.identity_set(on.id, None, Lsn(10), FIRST).await.expect("set");
    let epoch = store.raise_epoch(platform.source).await.expect("raised");
    let at = |table: &str| Relation { schema: on.schema.clone(), table: name(table) };
    let follow = async |oid, found: Option<Relation>| {
        store.follow_table(platform.source, epoch, (on.id, oid), found.as_ref()).await.expect("written");
        store.registration_by_id(on.id).await.expect("read").expect("it exists")
    };
    let stands = follow(7, Some(at("t"))).await;
    assert_eq!((stands.changed_from.clone(), follow(8, None).await), (None, stands), "nothing to write");
    let renamed = follow(7, Some(at("u"))).await;
    assert_eq!((renamed.table.as_str(), renamed.status), ("u", RegistrationStatus::Pending));
    assert_eq!(
        (renamed.changed_from.as_ref().map(SqlName::as_str), renamed.enabled_at_lsn),
        (Some("t"), Some(Lsn(10)))
    );
    let again = follow(7, Some(at("v"))).await;
    assert_eq!(again.changed_from, renamed.changed_from, "what was never told of is still to be told");
    store.change_told(epoch, &renamed).await.expect("not fenced");
    assert_eq!(store.registration_by_id(on.id).await.expect("read").as_ref(), Some(&again), "it has changed since");
    // What was seen under the old name says nothing of the new one.
    let missing = RegistrationStatus::Missing;
    store.mark_status(platform.source, epoch, (on.id, 7, &on.table), missing, None).await.expect("not fenced");
    assert_eq!(store.registration_by_id(on.id).await.expect("read").as_ref(), Some(&again));
    store.change_told(epoch, &again).await.expect("not fenced");
    let told = store.registration_by_id(on.id).await.expect("read").expect("it exists");
    assert_eq!(told.changed_from, None);

    platform.enable(project, "w", 9).await;
    let taken = follow(7, Some(at("w"))).await;
    assert_eq!((taken.table.as_str(), taken.status), ("v", missing), "that name is registered");
    assert_eq!(follow(7, Some(at("w"))).await, taken, "said once");
    let late = store.follow_table(platform.source, Epoch(epoch.0 - 1), (on.id, 7), None).await;
    assert!(matches!(late, Err(StoreError::Fenced)), "{late:?}");
}
