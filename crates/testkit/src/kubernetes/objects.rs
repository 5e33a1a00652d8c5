//! What the server keeps, and what it makes of each request: no I/O, no time.

use std::collections::{BTreeMap, VecDeque};

use serde_json::{Map, Value, json};

use super::status::Refusal;

/// Changes that are kept for watches.
const HISTORY: usize = 1000;
/// Spec fields of a Lease; with the default feature gates the server drops any other.
const FIELDS: [&str; 5] = ["acquireTime", "holderIdentity", "leaseDurationSeconds", "leaseTransitions", "renewTime"];

/// Namespace and name.
pub(super) type Key = (String, String);

/// One change, as a watch tells it.
#[derive(Debug, Clone)]
pub(super) struct Event {
    pub(super) revision: u64,
    pub(super) namespace: String,
    /// `ADDED`, `MODIFIED` or `DELETED`.
    pub(super) kind: &'static str,
    pub(super) object: Value,
}

#[derive(Debug, Clone)]
struct Stored {
    object: Value,
    /// Who set a field last, and whether by server-side apply.
    owners: BTreeMap<String, String>,
}

/// Leases by namespace and name under one rising revision.
#[derive(Debug, Clone, Default)]
pub(super) struct Objects {
    revision: u64,
    uids: u64,
    leases: BTreeMap<Key, Stored>,
    history: VecDeque<Event>,
    /// Watches from here or below are answered 410.
    compacted: u64,
}

impl Objects {
    pub(super) fn revision(&self) -> u64 {
        self.revision
    }

    pub(super) fn get(&self, key: &Key) -> Result<Value, Refusal> {
        self.leases.get(key).map(|stored| stored.object.clone()).ok_or_else(|| Refusal::not_found(&key.1))
    }

    pub(super) fn list(&self, namespace: &str, selector: &str) -> Value {
        let leases =
            self.leases.iter().filter(|((of, _), stored)| of == namespace && selects(selector, &stored.object));
        json!({"kind": "LeaseList", "apiVersion": "coordination.k8s.io/v1",
            "metadata": {"resourceVersion": self.revision.to_string()},
            "items": leases.map(|(_, stored)| stored.object.clone()).collect::<Vec<_>>()})
    }

    /// What happened after `revision`; 410 if that isn't known any more.
    pub(super) fn since(&self, revision: u64) -> Result<Vec<Event>, Refusal> {
        if revision < self.compacted {
            return Err(Refusal::gone(revision, self.compacted));
        }
        Ok(self.history.iter().filter(|event| event.revision > revision).cloned().collect())
    }

    /// Forgets the history, as etcd's compaction does.
    pub(super) fn compact(&mut self) {
        self.history.clear();
        self.compacted = self.revision;
    }

    /// POST.
    pub(super) fn create(&mut self, namespace: &str, body: &Value, manager: &str) -> Result<Value, Refusal> {
        let name = text(&body["metadata"]["name"]).ok_or_else(|| Refusal::invalid("", "name is required"))?;
        let key = (namespace.to_owned(), name.to_owned());
        if self.leases.contains_key(&key) {
            return Err(Refusal::already_exists(name));
        }
        if text(&body["metadata"]["resourceVersion"]).is_some() {
            return Err(Refusal::bad_request("resourceVersion should not be set on objects to be created"));
        }
        self.insert(key, body, manager)
    }

    /// PUT; true = it was created.
    pub(super) fn replace(&mut self, key: &Key, body: &Value, manager: &str) -> Result<(bool, Value), Refusal> {
        if text(&body["metadata"]["name"]) != Some(&key.1) {
            return Err(Refusal::bad_request("the name of the object does not match the name on the URL"));
        }
        let (uid, version) = (text(&body["metadata"]["uid"]), text(&body["metadata"]["resourceVersion"]));
        let Some(stored) = self.leases.get(key) else {
            return match uid {
                Some(uid) => Err(Refusal::precondition(&key.1, uid, "")),
                None => self.insert(key.clone(), body, manager).map(|object| (true, object)),
            };
        };
        match version {
            None => Err(Refusal::invalid(&key.1, "metadata.resourceVersion: must be specified for an update")),
            Some(version) => {
                check_preconditions(&key.1, &stored.object, uid, Some(version))?;
                self.store(key, merged_metadata(&stored.object, body), manager).map(|object| (false, object))
            }
        }
    }

    /// A merge patch: conditional only if the patch has a resourceVersion.
    pub(super) fn merge(&mut self, key: &Key, patch: &Value, manager: &str) -> Result<Value, Refusal> {
        let mut object = self.get(key)?;
        let (uid, version) = (text(&patch["metadata"]["uid"]), text(&patch["metadata"]["resourceVersion"]));
        check_preconditions(&key.1, &object, uid, version)?;
        merge_into(&mut object, patch);
        self.store(key, object, manager)
    }

    /// Server-side apply.
    pub(super) fn apply(&mut self, key: &Key, body: &Value, manager: &str, force: bool) -> Result<Value, Refusal> {
        let Some(stored) = self.leases.get(key) else { return self.insert(key.clone(), body, manager) };
        let (uid, version) = (text(&body["metadata"]["uid"]), text(&body["metadata"]["resourceVersion"]));
        check_preconditions(&key.1, &stored.object, uid, version)?;
        let applied = body["spec"].as_object().cloned().unwrap_or_default();
        let conflict = applied.iter().find_map(|(field, value)| {
            let owner = stored.owners.get(field).filter(|owner| *owner != manager)?;
            (stored.object["spec"][field] != *value).then_some((field, owner))
        });
        if let Some((field, owner)) = conflict.filter(|_| !force) {
            return Err(Refusal::field_conflict(owner, field));
        }
        let mut object = stored.object.clone();
        merge_into(
            &mut object,
            &json!({"spec": applied, "metadata": {"labels": body["metadata"]["labels"],
            "annotations": body["metadata"]["annotations"]}}),
        );
        self.store(key, object, manager)
    }

    /// DELETE with the preconditions of its options.
    pub(super) fn delete(&mut self, key: &Key, options: &Value) -> Result<(), Refusal> {
        let mut object = self.get(key)?;
        let wanted = &options["preconditions"];
        check_preconditions(&key.1, &object, text(&wanted["uid"]), text(&wanted["resourceVersion"]))?;
        self.leases.remove(key);
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        self.remember(&key.0, "DELETED", object);
        Ok(())
    }

    fn insert(&mut self, key: Key, body: &Value, manager: &str) -> Result<Value, Refusal> {
        let mut object = admit(&key.1, body)?;
        self.uids += 1;
        self.revision += 1;
        object["metadata"]["namespace"] = json!(key.0);
        object["metadata"]["uid"] = json!(format!("00000000-0000-4000-8000-{:012x}", self.uids));
        object["metadata"]["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let owners = fields_of(&object).map(|field| (field, manager.to_owned())).collect();
        self.remember(&key.0, "ADDED", object.clone());
        self.leases.insert(key, Stored { object: object.clone(), owners });
        Ok(object)
    }

    /// Stores a new state of an object that exists; one that is no change keeps the version.
    fn store(&mut self, key: &Key, object: Value, manager: &str) -> Result<Value, Refusal> {
        let mut object = admit(&key.1, &object)?;
        let stored = self.leases.get_mut(key).ok_or_else(|| Refusal::not_found(&key.1))?;
        object["metadata"]["resourceVersion"] = stored.object["metadata"]["resourceVersion"].clone();
        if object == stored.object {
            return Ok(object);
        }
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let changed = fields_of(&object).filter(|field| object["spec"][field] != stored.object["spec"][field]);
        stored.owners.extend(changed.map(|field| (field, manager.to_owned())));
        stored.object = object.clone();
        self.remember(&key.0, "MODIFIED", object.clone());
        Ok(object)
    }

    fn remember(&mut self, namespace: &str, kind: &'static str, object: Value) {
        self.history.push_back(Event { revision: self.revision, namespace: namespace.to_owned(), kind, object });
        if self.history.len() > HISTORY
            && let Some(forgotten) = self.history.pop_front()
        {
            self.compacted = forgotten.revision;
        }
    }
}

/// Only `key=value` with commas.
pub(super) fn selects(selector: &str, object: &Value) -> bool {
    let mut terms = selector.split(',').filter(|term| !term.is_empty());
    terms.all(|term| {
        term.split_once('=').is_some_and(|(key, value)| text(&object["metadata"]["labels"][key]) == Some(value))
    })
}

fn check_preconditions(name: &str, object: &Value, uid: Option<&str>, version: Option<&str>) -> Result<(), Refusal> {
    let metadata = &object["metadata"];
    if let Some(uid) = uid.filter(|uid| text(&metadata["uid"]) != Some(uid)) {
        return Err(Refusal::precondition(name, uid, text(&metadata["uid"]).unwrap_or_default()));
    }
    match version {
        Some(version) if text(&metadata["resourceVersion"]) != Some(version) => Err(Refusal::conflict(name)),
        _ => Ok(()),
    }
}

/// What the client may set of the metadata, the rest from what is stored.
fn merged_metadata(stored: &Value, body: &Value) -> Value {
    let mut object = body.clone();
    object["metadata"] = stored["metadata"].clone();
    for part in ["labels", "annotations", "ownerReferences"] {
        object["metadata"][part] = body["metadata"][part].clone();
    }
    object
}

/// Validates and normalises: null is absent, fields behind closed feature gates are dropped silently.
fn admit(name: &str, object: &Value) -> Result<Value, Refusal> {
    let mut object = json!({"kind": "Lease", "apiVersion": "coordination.k8s.io/v1",
        "metadata": object["metadata"], "spec": object["spec"]});
    let spec = object["spec"].as_object().cloned().unwrap_or_default();
    let spec: Map<_, _> =
        spec.into_iter().filter(|(field, value)| FIELDS.contains(&field.as_str()) && !value.is_null()).collect();
    let number =
        |field: &str| spec.get(field).map(|value| value.as_i64().filter(|number| i32::try_from(*number).is_ok()));
    for (field, least) in [("leaseDurationSeconds", 1), ("leaseTransitions", 0)] {
        match number(field) {
            Some(None) => return Err(Refusal::bad_request(&format!("{field} is no 32-bit integer"))),
            Some(Some(number)) if number < least => {
                return Err(Refusal::invalid(name, &format!("spec.{field}: must be at least {least}")));
            }
            _ => {}
        }
    }
    for field in ["acquireTime", "renewTime"] {
        if spec.get(field).is_some_and(|value| !text(value).is_some_and(is_micro_time)) {
            return Err(Refusal::bad_request(&format!("{field} is no MicroTime")));
        }
    }
    object["spec"] = Value::Object(spec);
    let metadata = object["metadata"].as_object().cloned().unwrap_or_default();
    object["metadata"] = Value::Object(metadata.into_iter().filter(|(_, value)| !value.is_null()).collect());
    Ok(object)
}

/// `2026-01-01T00:00:00.000000Z`.
fn is_micro_time(text: &str) -> bool {
    let shape = "0000-00-00T00:00:00.000000Z";
    text.len() == shape.len()
        && text.bytes().zip(shape.bytes()).all(|(byte, wanted)| match wanted {
            b'0' => byte.is_ascii_digit(),
            other => byte == other,
        })
}

fn merge_into(target: &mut Value, patch: &Value) {
    let Value::Object(patch) = patch else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in patch {
        if value.is_null() {
            target.as_object_mut().and_then(|object| object.remove(key));
        } else {
            merge_into(&mut target[key], value);
        }
    }
}

fn fields_of(object: &Value) -> impl Iterator<Item = String> {
    object["spec"].as_object().cloned().unwrap_or_default().into_iter().map(|(field, _)| field)
}

/// A string that isn't empty.
fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}
