//! For tests: an issuer of end users' tokens with a key set on a port of the loopback.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use jsonwebtoken::{Algorithm, EncodingKey, Header, jwk::Jwk};
use serde_json::{Value, json};

/// PKCS #1, made for these tests.
const RSA: &[u8] = include_bytes!("rsa_2048.der");

/// What the endpoint answers.
#[derive(Debug, Clone)]
pub enum Answer {
    /// 200 and this.
    Body(String),
    /// This and no body.
    Status(u16),
    /// 302 to there.
    Redirect(String),
    /// Nothing, ever.
    Silence,
}

/// The endpoint.
#[derive(Debug)]
pub struct Endpoint {
    /// A project's `jwks_url`.
    pub url: String,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    answer: Mutex<Answer>,
    hits: AtomicUsize,
}

impl Endpoint {
    /// On a free port.
    pub async fn start(answer: Answer) -> Self {
        let shared = Arc::new(Shared { answer: Mutex::new(answer), hits: AtomicUsize::new(0) });
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let url = format!("http://localhost:{}/jwks.json", listener.local_addr().expect("an address").port());
        let router = Router::new().route("/jwks.json", get(answer_of)).with_state(Arc::clone(&shared));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, shared }
    }

    /// With these keys.
    pub async fn of(keys: &[&Key]) -> Self {
        Self::start(set(keys)).await
    }

    /// From now on it answers this.
    pub fn answer(&self, answer: Answer) {
        *self.shared.answer.lock().expect("nobody panics with it") = answer;
    }

    /// How often it was asked.
    pub fn hits(&self) -> usize {
        self.shared.hits.load(Ordering::SeqCst)
    }
}

async fn answer_of(State(shared): State<Arc<Shared>>) -> Response {
    shared.hits.fetch_add(1, Ordering::SeqCst);
    let answer = shared.answer.lock().expect("nobody panics with it").clone();
    match answer {
        Answer::Body(body) => body.into_response(),
        Answer::Status(status) => StatusCode::from_u16(status).expect("a status").into_response(),
        Answer::Redirect(to) => (StatusCode::FOUND, [(header::LOCATION, to)]).into_response(),
        Answer::Silence => std::future::pending().await,
    }
}

/// The set of these keys.
pub fn set(keys: &[&Key]) -> Answer {
    let keys: Vec<Value> = keys.iter().map(|key| key.public()).collect();
    Answer::Body(json!({"keys": keys}).to_string())
}

/// A key of the issuer.
#[derive(Debug)]
pub struct Key {
    /// Its id.
    pub kid: String,
    algorithm: Algorithm,
    private: EncodingKey,
}

impl Key {
    /// A new Ed25519 key.
    pub fn edwards(kid: &str) -> Self {
        // PKCS #8 is a constant before the seed.
        let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        der.extend(rand::random::<[u8; 32]>());
        Self { kid: kid.to_owned(), algorithm: Algorithm::EdDSA, private: EncodingKey::from_ed_der(&der) }
    }

    /// The RSA key of these tests; there is one.
    pub fn rsa(kid: &str) -> Self {
        Self { kid: kid.to_owned(), algorithm: Algorithm::RS256, private: EncodingKey::from_rsa_der(RSA) }
    }

    /// As a JWKS has it.
    pub fn public(&self) -> Value {
        let mut jwk = Jwk::from_encoding_key(&self.private, self.algorithm).expect("a public key");
        jwk.common.key_id = Some(self.kid.clone());
        serde_json::to_value(jwk).expect("JSON")
    }

    /// A token with this key's id.
    pub fn sign(&self, claims: &Value) -> String {
        self.sign_as(&self.kid, self.algorithm, claims)
    }

    /// With whatever header.
    pub fn sign_as(&self, kid: &str, algorithm: Algorithm, claims: &Value) -> String {
        let mut header = Header::new(algorithm);
        header.kid = Some(kid.to_owned());
        jsonwebtoken::encode(&header, claims, &self.private).expect("signs")
    }
}
