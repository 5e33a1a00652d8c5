//! Tokens of other issuers, by a project's JWKS (R-SEC-2).

use std::time::Duration;

use aura_auth::{
    AccessRules, AuthError, JwksOptions, Minter, Role, Verified, Verifier, generate_secret,
    issuer::{Answer, Endpoint, Key, set},
};
use aura_testkit::eventually;
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use futures_util::future::join_all;
use jsonwebtoken::Algorithm;
use secrecy::SecretString;
use serde_json::{Value, json};

use crate::{Project, now, sign};

const PATIENCE: Duration = Duration::from_secs(20);

/// A project with a JWKS URL, and the door.
struct Stage {
    project: Project,
    rules: AccessRules,
    verifier: Verifier,
}

impl Stage {
    fn new(url: &str, refresh: Duration) -> Self {
        let project = Project::new();
        let rules = AccessRules { jwks_url: Some(url.to_owned()), ..project.rules() };
        Self { project, rules, verifier: Verifier::new(JwksOptions { loopback: true, refresh }) }
    }

    /// Looks again at once.
    fn eager(url: &str) -> Self {
        Self::new(url, Duration::ZERO)
    }

    /// As in production.
    fn patient(url: &str) -> Self {
        Self::new(url, JwksOptions::default().refresh)
    }

    async fn verify(&self, token: &str) -> Result<Verified, AuthError> {
        self.verifier.verify_project(&self.rules, token).await
    }
}

fn claims() -> Value {
    json!({"iss": "https://id.example", "role": "authenticated", "sub": "alice", "exp": now() + 60})
}

fn role(role: &str) -> Value {
    json!({"iss": "aura", "role": role, "sub": "alice", "exp": now() + 60})
}

#[tokio::test]
async fn r_sec_2_users_tokens_of_a_jwks_are_accepted_beside_the_secrets() {
    let (rsa, edwards) = (Key::rsa("rsa"), Key::edwards("ed"));
    let endpoint = Endpoint::of(&[&rsa, &edwards]).await;
    let stage = Stage::patient(&endpoint.url);
    for key in [&rsa, &edwards] {
        let verified = stage.verify(&key.sign(&claims())).await.unwrap();
        assert_eq!((verified.role, verified.key_id, verified.has_ref), (Role::Authenticated, None, false));
        assert_eq!(verified.payload["sub"], "alice");
    }
    let own = stage.project.sign(&claims(), None);
    assert!(stage.verify(&own).await.is_ok());
    assert_eq!(endpoint.hits(), 1);
    let expired = rsa.sign(&json!({"role": "authenticated", "exp": now() - 60}));
    assert_eq!(stage.verify(&expired).await, Err(AuthError::Expired));
    let foreign = rsa.sign(&json!({"role": "authenticated", "ref": uuid::Uuid::new_v4(), "exp": now() + 60}));
    assert_eq!(stage.verify(&foreign).await, Err(AuthError::WrongProject));
}

#[tokio::test]
async fn r_sec_2_no_key_of_a_jwks_speaks_for_an_api_key() {
    let project = Project::new();
    let service = project.service_kid();
    // The issuer claims the id of the project's own key.
    let (key, thief) = (Key::rsa("rsa"), Key::rsa(&service));
    let endpoint = Endpoint::of(&[&key, &thief]).await;
    let stage = Stage { project, ..Stage::patient(&endpoint.url) };
    let rules = AccessRules { jwks_url: Some(endpoint.url.clone()), ..stage.project.rules() };
    let verify = async |token: &str| stage.verifier.verify_project(&rules, token).await;
    for word in ["service_role", "platform_admin"] {
        assert_eq!(verify(&key.sign(&role(word))).await, Err(AuthError::RoleNeedsKey), "{word}");
    }
    assert_eq!(verify(&thief.sign(&role("service_role"))).await, Err(AuthError::Forged));
    assert_eq!(verify(&key.sign(&role("postgres"))).await, Err(AuthError::UnknownRole));
    assert!(verify(&key.sign(&role("editor"))).await.is_ok());
    let real = stage.project.sign(&stage.project.service_claims(), Some(&service));
    assert_eq!(verify(&real).await.map(|verified| verified.role), Ok(Role::ServiceRole));
}

#[tokio::test]
async fn n_8_what_a_header_says_never_chooses_the_algorithm_or_the_key() {
    let rsa = Key::rsa("rsa");
    let endpoint = Endpoint::of(&[&rsa]).await;
    let tempting = Endpoint::of(&[&Key::rsa("mine")]).await;
    let stage = Stage::patient(&endpoint.url);
    assert!(stage.verify(&rsa.sign(&claims())).await.is_ok(), "the control");
    // The public key, which everybody has, as an HMAC secret, in each of its forms.
    let public = rsa.public();
    for secret in [public.to_string(), public["n"].as_str().unwrap().to_owned()] {
        let forged = sign(&SecretString::from(secret), Algorithm::HS256, &claims(), Some("rsa"));
        assert_eq!(stage.verify(&forged).await, Err(AuthError::Forged));
    }
    let raw = BASE64_URL_SAFE_NO_PAD.decode(public["n"].as_str().unwrap()).unwrap();
    let mut header = jsonwebtoken::Header::new(Algorithm::HS256);
    header.kid = Some("rsa".to_owned());
    let forged = jsonwebtoken::encode(&header, &claims(), &jsonwebtoken::EncodingKey::from_secret(&raw).unwrap());
    assert_eq!(stage.verify(&forged.unwrap()).await, Err(AuthError::Forged));
    // RS256 under the id of an HS256 key, and under none.
    let own = stage.project.service_kid();
    assert_eq!(stage.verify(&rsa.sign_as(&own, Algorithm::RS256, &role("service_role"))).await, Err(AuthError::Forged));
    assert_eq!(stage.verify(&rsa.sign_as("rsa", Algorithm::RS512, &claims())).await, Err(AuthError::Forged));
    for kid in ["../../x", "' or 1=1", "*", "rsa\u{0}", &"k".repeat(4000)] {
        assert_eq!(stage.verify(&rsa.sign_as(kid, Algorithm::RS256, &claims())).await, Err(AuthError::Forged), "{kid}");
    }
    let part = |value: Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    for alg in ["none", "None", "NONE", "nOnE", ""] {
        let token = format!("{}.{}.", part(json!({"alg": alg, "kid": "rsa"})), part(claims()));
        let refused = stage.verify(&token).await;
        assert!(matches!(refused, Err(AuthError::Malformed | AuthError::Forged)), "{alg}: {refused:?}");
    }
    // A key of the forger's own, offered in the token.
    let mine = Key::edwards("mine");
    let signed = mine.sign(&claims());
    let (head, rest) = signed.split_once('.').unwrap();
    for offer in [
        json!({"jwk": mine.public()}),
        json!({"jku": tempting.url}),
        json!({"x5u": tempting.url}),
        json!({"x5c": ["MIIB"]}),
    ] {
        let mut header: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(head).unwrap()).unwrap();
        header.as_object_mut().unwrap().extend(offer.as_object().unwrap().clone());
        let refused = stage.verify(&format!("{}.{rest}", part(header))).await;
        assert!(matches!(refused, Err(AuthError::Malformed | AuthError::Forged)), "{offer}: {refused:?}");
    }
    assert_eq!(tempting.hits(), 0, "the listener sees no request");
    assert_eq!(endpoint.hits(), 1);
}

#[tokio::test]
async fn n_9_a_new_key_is_found_and_a_removed_one_forgotten() {
    let (first, second) = (Key::edwards("first"), Key::edwards("second"));
    let endpoint = Endpoint::of(&[&first]).await;
    let stage = Stage::eager(&endpoint.url);
    assert!(stage.verify(&first.sign(&claims())).await.is_ok());
    endpoint.answer(set(&[&first, &second]));
    assert!(stage.verify(&second.sign(&claims())).await.is_ok(), "the next look finds it");
    assert!(stage.verify(&first.sign(&claims())).await.is_ok());
    endpoint.answer(set(&[&second]));
    let token = first.sign(&claims());
    let refused = || async { stage.verify(&token).await == Err(AuthError::Forged) };
    eventually(PATIENCE, refused).await.unwrap();
    assert!(stage.verify(&second.sign(&claims())).await.is_ok());
}

#[tokio::test]
async fn n_9_known_keys_go_on_while_the_endpoint_is_down_slow_or_wrong() {
    let (known, new) = (Key::edwards("known"), Key::edwards("new"));
    let endpoint = Endpoint::of(&[&known]).await;
    let stage = Stage::eager(&endpoint.url);
    assert!(stage.verify(&known.sign(&claims())).await.is_ok());
    let twice = json!({"keys": [known.public(), known.public()]}).to_string();
    let symmetric = json!({"keys": [{"kty": "oct", "k": "c2VjcmV0", "kid": "known"}, known.public()]}).to_string();
    let large = format!("{}{}", json!({"keys": [new.public()]}), " ".repeat(64 << 10));
    let elsewhere = Endpoint::of(&[&new]).await;
    for answer in [
        Answer::Status(500),
        Answer::Status(404),
        Answer::Body("<html>".to_owned()),
        Answer::Body(twice),
        Answer::Body(symmetric),
        Answer::Body(large),
        Answer::Redirect(elsewhere.url.clone()),
    ] {
        endpoint.answer(answer.clone());
        assert_eq!(stage.verify(&new.sign(&claims())).await, Err(AuthError::Forged), "{answer:?}");
        assert!(stage.verify(&known.sign(&claims())).await.is_ok(), "{answer:?}");
    }
    assert_eq!(elsewhere.hits(), 0, "no redirect is followed");
    endpoint.answer(Answer::Silence);
    let (fresh, token) = (new.sign(&claims()), known.sign(&claims()));
    let (slow, quick) = tokio::join!(stage.verify(&fresh), async {
        let within = tokio::time::timeout(Duration::from_secs(4), stage.verify(&token)).await;
        within.expect("who is known doesn't wait for those who aren't")
    });
    assert_eq!(slow, Err(AuthError::Forged), "after 5 s");
    assert!(quick.is_ok());
}

#[tokio::test]
async fn n_9_ten_thousand_unknown_ids_are_one_look() {
    let key = Key::edwards("key");
    let endpoint = Endpoint::of(&[&key]).await;
    let stage = Stage::patient(&endpoint.url);
    let stranger = Key::edwards("stranger");
    let claims = claims();
    let tokens: Vec<_> =
        (0..10_000).map(|n| stranger.sign_as(&format!("unknown-{n}"), Algorithm::EdDSA, &claims)).collect();
    let outcomes = join_all(tokens.iter().map(|token| stage.verify(token))).await;
    assert!(outcomes.iter().all(|outcome| *outcome == Err(AuthError::Forged)));
    assert!(stage.verify(&key.sign(&claims)).await.is_ok());
    assert_eq!(endpoint.hits(), 1);
    assert_eq!(JwksOptions::default().refresh, Duration::from_secs(30));
}

#[tokio::test]
async fn n_9_who_goes_away_does_not_take_the_look_along() {
    let key = Key::edwards("key");
    let endpoint = Endpoint::of(&[&key]).await;
    let stage = Stage::patient(&endpoint.url);
    let token = key.sign(&claims());
    let abandoned = tokio::time::timeout(Duration::from_millis(1), stage.verify(&token)).await;
    drop(abandoned);
    assert!(stage.verify(&token).await.is_ok(), "it was looked for all the same");
    assert_eq!(endpoint.hits(), 1);
}

#[tokio::test]
async fn r_sec_2_a_set_that_was_never_read_is_no_verdict_and_private_hosts_are_never_asked() {
    let key = Key::edwards("key");
    let endpoint = Endpoint::start(Answer::Status(503)).await;
    let stage = Stage::patient(&endpoint.url);
    assert_eq!(stage.verify(&key.sign(&claims())).await, Err(AuthError::KeySetUnavailable));
    assert_eq!(endpoint.hits(), 1);
    // What is signed with the secret needs no set, whatever its kid; a token without a kid has no key there.
    assert!(stage.verify(&stage.project.sign(&claims(), Some("idp-1"))).await.is_ok());
    let other = Minter::new(&generate_secret()).user_token(stage.project.id, "a", serde_json::Map::new(), PATIENCE);
    assert_eq!(stage.verify(&other.unwrap()).await, Err(AuthError::Forged));
    // The door of production: nothing is asked on the loopback, by number or by name.
    let endpoint = Endpoint::of(&[&key]).await;
    for url in [endpoint.url.clone(), endpoint.url.replace("http://", "https://")] {
        let rules = AccessRules { jwks_url: Some(url), ..stage.project.rules() };
        let refused = Verifier::default().verify_project(&rules, &key.sign(&claims())).await;
        assert_eq!(refused, Err(AuthError::KeySetUnavailable));
    }
    assert_eq!(endpoint.hits(), 0);
}
