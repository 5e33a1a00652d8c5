//! What is accepted as a key and what isn't (R-SEC-2).

mod jwks;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use aura_auth::{
    AccessRules, AuthError, KeyRole, LiveKey, LiveSecret, MAX_TOKEN_BYTES, Minter, Role, Verified, Verifier,
    generate_secret, peek, token_from_headers,
};
use aura_domain::ProjectId;
use axum::http::HeaderMap;
use base64::{Engine, prelude::BASE64_URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value, json};
use uuid::Uuid;

const HOUR: Duration = Duration::from_secs(3600);

struct Project {
    id: ProjectId,
    secret: SecretString,
    keys: Vec<LiveKey>,
}

impl Project {
    fn new() -> Self {
        let keys = [KeyRole::Anon, KeyRole::ServiceRole].map(|role| LiveKey { id: Uuid::new_v4(), role, until: None });
        Self { id: ProjectId(Uuid::new_v4()), secret: generate_secret(), keys: keys.to_vec() }
    }

    fn verify(&self, token: &str) -> Result<Verified, AuthError> {
        self.verify_for(None, token)
    }

    fn verify_for(&self, audience: Option<&str>, token: &str) -> Result<Verified, AuthError> {
        verify(&AccessRules { audience: audience.map(str::to_owned), ..self.rules() }, token)
    }

    fn rules(&self) -> AccessRules {
        AccessRules {
            project: self.id,
            secrets: vec![LiveSecret { secret: self.secret.clone(), until: None }],
            keys: self.keys.clone(),
            audience: None,
            jwks_url: None,
            roles: vec!["editor".to_owned()],
        }
    }

    fn sign(&self, claims: &Value, kid: Option<&str>) -> String {
        sign(&self.secret, Algorithm::HS256, claims, kid)
    }

    /// The claims of a valid service key, to be spoilt.
    fn service_claims(&self) -> Value {
        json!({"iss": "aura", "ref": self.id, "role": "service_role", "exp": now() + 60})
    }

    fn service_kid(&self) -> String {
        self.keys[1].id.to_string()
    }
}

/// Without a JWKS nothing is waited for.
fn verify(rules: &AccessRules, token: &str) -> Result<Verified, AuthError> {
    let verifier = Verifier::default();
    let mut verified = std::pin::pin!(verifier.verify_project(rules, token));
    match verified.as_mut().poll(&mut std::task::Context::from_waker(std::task::Waker::noop())) {
        std::task::Poll::Ready(verified) => verified,
        std::task::Poll::Pending => panic!("it waits for something"),
    }
}

fn sign(secret: &SecretString, algorithm: Algorithm, claims: &Value, kid: Option<&str>) -> String {
    let mut header = Header::new(algorithm);
    header.kid = kid.map(str::to_owned);
    let key = EncodingKey::from_secret(secret.expose_secret().as_bytes()).expect("a secret");
    jsonwebtoken::encode(&header, claims, &key).expect("signs")
}

fn now() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs().cast_signed()
}

#[test]
fn r_sec_2_minted_keys_and_tokens_are_accepted_as_what_they_are() {
    let project = Project::new();
    let minter = Minter::new(&project.secret);
    for key in &project.keys {
        let token = minter.project_key(project.id, key.id, key.role).unwrap();
        let verified = project.verify(&token).unwrap();
        assert_eq!((verified.role.as_str(), verified.key_id), (key.role.as_str(), Some(key.id)));
        assert_eq!(peek(&token).unwrap().kid, Some(key.id));
        assert_eq!(peek(&token).unwrap().project_ref, Some(project.id));
    }
    let claims = Map::from_iter([("org".to_owned(), json!(7))]);
    let token = minter.user_token(project.id, "alice", claims, HOUR).unwrap();
    let verified = project.verify(&token).unwrap();
    assert_eq!((verified.role, verified.key_id, verified.has_ref), (Role::Authenticated, None, true));
    assert_eq!((verified.payload["sub"].as_str(), verified.payload["org"].as_i64()), (Some("alice"), Some(7)));
    assert!((verified.exp - now() - 3600).abs() <= 2);
}

#[test]
fn r_sec_2_the_service_role_comes_only_from_a_live_key() {
    let project = Project::new();
    let claims = project.service_claims();
    let kid = project.service_kid();
    assert!(project.verify(&project.sign(&claims, Some(&kid))).is_ok(), "the control");
    assert_eq!(project.verify(&project.sign(&claims, None)), Err(AuthError::RoleNeedsKey));
    let unknown = Uuid::new_v4().to_string();
    assert_eq!(project.verify(&project.sign(&claims, Some(&unknown))), Err(AuthError::Revoked));
    let anon = project.keys[0].id.to_string();
    assert_eq!(project.verify(&project.sign(&claims, Some(&anon))), Err(AuthError::BadClaim("role")));
    let mut foreign_issuer = claims.clone();
    foreign_issuer["iss"] = json!("https://id.example");
    assert_eq!(project.verify(&project.sign(&foreign_issuer, Some(&kid))), Err(AuthError::RoleNeedsKey));
    let mut admin = claims;
    admin["role"] = json!("platform_admin");
    assert_eq!(project.verify(&project.sign(&admin, Some(&kid))), Err(AuthError::RoleNeedsKey));
}

#[test]
fn r_sec_2_the_algorithm_comes_from_the_key_never_from_the_header() {
    let project = Project::new();
    let (claims, kid) = (project.service_claims(), project.service_kid());
    let other = sign(&project.secret, Algorithm::HS512, &claims, Some(&kid));
    assert_eq!(project.verify(&other), Err(AuthError::Forged));
    let encode = |value: &Value| BASE64_URL_SAFE_NO_PAD.encode(value.to_string());
    for alg in ["none", "None", "NONE"] {
        let token = format!("{}.{}.", encode(&json!({"alg": alg, "kid": kid})), encode(&claims));
        assert!(matches!(project.verify(&token), Err(AuthError::Malformed | AuthError::Forged)), "{alg}");
    }
}

#[test]
fn r_sec_2_forged_expired_foreign_and_incomplete_tokens_are_refused() {
    let project = Project::new();
    let kid = project.service_kid();
    let forged = sign(&generate_secret(), Algorithm::HS256, &project.service_claims(), Some(&kid));
    assert_eq!(project.verify(&forged), Err(AuthError::Forged));
    // What is no signature at all is no valid one: where nobody has a secret, nobody can tell the two apart.
    let unsigned = format!("{}.!", forged.rsplit_once('.').unwrap().0);
    assert_eq!(project.verify(&unsigned), Err(AuthError::Forged));
    let with = |name: &str, value: Value| {
        let mut claims = project.service_claims();
        claims[name] = value;
        project.verify(&project.sign(&claims, Some(&kid))).map(|verified| verified.role)
    };
    assert_eq!(with("exp", json!(now() - 11)), Err(AuthError::Expired));
    assert_eq!(with("exp", json!(now() - 5)), Ok(Role::ServiceRole), "leeway 10 s");
    assert_eq!(with("exp", json!(now() as f64 + 0.5)), Ok(Role::ServiceRole), "NumericDate may have a fraction");
    assert_eq!(with("nbf", json!(now() + 60)), Err(AuthError::NotYetValid));
    assert_eq!(with("nbf", json!(now() + 5)), Ok(Role::ServiceRole), "leeway 10 s");
    assert_eq!(with("ref", json!(Uuid::new_v4())), Err(AuthError::WrongProject));
    assert_eq!(with("ref", json!(7)), Err(AuthError::BadClaim("ref")));
    assert_eq!(with("role", json!(null)), Err(AuthError::BadClaim("role")));
    let no_exp = json!({"role": "authenticated", "sub": "a"});
    assert_eq!(project.verify(&project.sign(&no_exp, None)), Err(AuthError::MissingClaim("exp")));
    let no_role = json!({"sub": "a", "exp": now() + 60});
    assert_eq!(project.verify(&project.sign(&no_role, None)), Err(AuthError::MissingClaim("role")));
    for text in ["", "a", "a.b.c", "..", &"x".repeat(MAX_TOKEN_BYTES + 1)] {
        assert_eq!(project.verify(text), Err(AuthError::Malformed));
        assert_eq!(peek(text), Err(AuthError::Malformed));
    }
}

#[test]
fn r_sec_2_a_project_may_ask_for_an_audience_of_user_tokens_not_of_keys() {
    let project = Project::new();
    let user = |aud: Value| project.sign(&json!({"role": "authenticated", "aud": aud, "exp": now() + 60}), None);
    assert!(project.verify(&user(json!("anything"))).is_ok());
    assert!(project.verify_for(Some("app"), &user(json!(["x", "app"]))).is_ok());
    assert!(project.verify_for(Some("app"), &user(json!("app"))).is_ok());
    for aud in [json!("x"), json!(["x"]), json!(7), json!(null)] {
        assert_eq!(project.verify_for(Some("app"), &user(aud)), Err(AuthError::WrongAudience));
    }
    let key = project.sign(&project.service_claims(), Some(&project.service_kid()));
    assert!(project.verify_for(Some("app"), &key).is_ok());
}

#[test]
fn n_10_a_role_word_is_one_of_the_projects_or_refused() {
    let project = Project::new();
    let role = |role: Value, kid: Option<&str>| {
        let claims = json!({"iss": "idp", "role": role, "sub": "a", "exp": now() + 60});
        project.verify(&project.sign(&claims, kid)).map(|verified| verified.role)
    };
    assert_eq!(role(json!("editor"), None), Ok(Role::Other("editor".to_owned())), "one of its own");
    for word in ["postgres", "editor ", "Editor", "p_x_anon", "aura_service_role", "none", "visibility"] {
        assert_eq!(role(json!(word), None), Err(AuthError::UnknownRole), "{word}");
    }
    for word in ["service_role", "platform_admin"] {
        assert_eq!(role(json!(word), None), Err(AuthError::RoleNeedsKey), "{word}");
        assert_eq!(role(json!(word), Some(&project.service_kid())), Err(AuthError::RoleNeedsKey), "{word}");
    }
    for word in [json!(["anon"]), json!({"role": "anon"}), json!(7), json!(null), json!("")] {
        assert_eq!(role(word.clone(), None), Err(AuthError::BadClaim("role")), "{word}");
    }
    assert_eq!(role(json!("x".repeat(1 << 20)), None), Err(AuthError::Malformed));
}

#[test]
fn n_11_claims_are_bounded_and_judged_before_anybody_reads_them() {
    let project = Project::new();
    let with = |value: Value| {
        let claims = json!({"role": "authenticated", "exp": now() + 60, "x": value});
        project.verify(&project.sign(&claims, None))
    };
    let quotes = r#"'; drop table t; -- " \ $$"#;
    assert_eq!(with(json!(quotes)).unwrap().payload["x"], quotes);
    assert_eq!(with(json!("x".repeat(64 << 10))), Err(AuthError::Malformed));
    let deep = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!([inner]));
    assert!(with(deep(50)).is_ok());
    assert_eq!(with(deep(200)), Err(AuthError::Malformed), "deeper than anybody's parser need go");
    // What PostgreSQL can't hold is refused where claims are made of it.
    let nul = with(json!("a\u{0}b")).unwrap();
    assert!(aura_domain::Claims::from_payload(&nul.payload).is_err());
}

#[test]
fn r_sec_2_keys_and_secrets_that_are_replaced_are_good_until_then() {
    let project = Project::new();
    let (old, later, past) = (generate_secret(), now() + 60, now() - 1);
    let [anon, service] = [project.keys[0], project.keys[1]];
    let user = Minter::new(&old).user_token(project.id, "a", Map::new(), HOUR).unwrap();
    let with_old = |until| {
        let mut rules = project.rules();
        rules.secrets.push(LiveSecret { secret: old.clone(), until });
        verify(&rules, &user).map(|verified| verified.ends)
    };
    assert_eq!(with_old(Some(later)), Ok(Some(later)));
    assert_eq!(with_old(Some(past)), Err(AuthError::Forged));
    let key = Minter::new(&project.secret).project_key(project.id, anon.id, KeyRole::Anon).unwrap();
    let with_key = |until| {
        let rules = AccessRules { keys: vec![LiveKey { until, ..anon }, service], ..project.rules() };
        verify(&rules, &key).map(|verified| (verified.key_id, verified.ends))
    };
    assert_eq!(with_key(Some(later)), Ok((Some(anon.id), Some(later))));
    assert_eq!(with_key(Some(past)), Err(AuthError::Revoked));
    // The secret that goes first takes its keys with it.
    let rules = AccessRules {
        secrets: vec![LiveSecret { secret: project.secret.clone(), until: Some(later - 30) }],
        keys: vec![LiveKey { until: Some(later), ..anon }],
        ..project.rules()
    };
    assert_eq!(verify(&rules, &key).map(|verified| verified.ends), Ok(Some(later - 30)));
}

#[test]
fn a_token_without_ref_says_so_and_an_issuers_own_kid_is_not_ours() {
    let project = Project::new();
    let token = project.sign(&json!({"role": "authenticated", "iss": "idp", "exp": now() + 60}), Some("idp-key-1"));
    let verified = project.verify(&token).unwrap();
    assert!(!verified.has_ref && verified.key_id.is_none());
    assert_eq!(peek(&token).unwrap().project_ref, None);
}

#[test]
fn platform_keys_are_verified_with_the_platform_secret_only() {
    let (platform, project) = (generate_secret(), Project::new());
    let key = Minter::new(&platform).platform_key(HOUR).unwrap();
    assert_eq!(Verifier::verify_platform(&platform, &key).map(|verified| verified.role), Ok(Role::PlatformAdmin));
    assert_eq!(Verifier::verify_platform(&generate_secret(), &key), Err(AuthError::Forged));
    assert_eq!(project.verify(&key), Err(AuthError::Forged));
    let service = project.sign(&project.service_claims(), None);
    assert_eq!(Verifier::verify_platform(&project.secret, &service), Err(AuthError::BadClaim("role")));
}

#[test]
fn bearer_wins_over_apikey() {
    let headers = |pairs: &[(&'static str, &'static str)]| {
        pairs.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect::<HeaderMap>()
    };
    let token = |pairs: &[(&'static str, &'static str)]| token_from_headers(&headers(pairs)).map(str::to_owned);
    assert_eq!(token(&[("apikey", "a"), ("authorization", "Bearer b")]).as_deref(), Ok("b"));
    assert_eq!(token(&[("apikey", "a")]).as_deref(), Ok("a"));
    assert_eq!(token(&[]), Err(AuthError::Missing));
    assert_eq!(token(&[("authorization", "Basic b")]), Err(AuthError::Malformed));
}
