//! Server URLs: async-nats leaves the credentials in a URL unused, and logs the URL.

use std::net::IpAddr;

use async_nats::ConnectOptions;
use url::Url;

use crate::BusError;

/// Servers to try, without secrets, and how to sign in.
pub(super) struct Address {
    pub(super) servers: Vec<String>,
    credentials: Option<(String, Option<String>)>,
}

impl Address {
    /// Parses URLs separated by commas; the first that has credentials decides.
    pub(super) fn parse(text: &str) -> Result<Self, BusError> {
        let mut address = Self { servers: Vec::new(), credentials: None };
        for part in text.split(',').map(str::trim) {
            let full = if part.contains("://") { part.to_owned() } else { format!("nats://{part}") };
            let mut url = Url::parse(&full).map_err(|_| bad_url())?;
            if !url.username().is_empty() && address.credentials.is_none() {
                let password = url.password().map(percent_decoded).transpose()?;
                address.credentials = Some((percent_decoded(url.username())?, password));
            }
            url.set_username("").and_then(|()| url.set_password(None)).map_err(|()| bad_url())?;
            address.servers.push(url.into());
        }
        Ok(address)
    }

    /// `user:password@` signs in with both; `token@` with a token.
    pub(super) fn sign_in(&self, options: ConnectOptions) -> ConnectOptions {
        match self.credentials.clone() {
            None => options,
            Some((user, Some(password))) => options.user_and_password(user, password),
            Some((token, None)) => options.token(token),
        }
    }
}

/// What is wrong with URLs of the bus before anybody connects, in words for the operator that repeat nothing of them: not
/// URLs, or for production no credentials, or no TLS to a server that isn't on loopback (R-SEC-6).
pub fn url_problems(urls: &str, is_production: bool) -> Vec<String> {
    if urls == "memory:" {
        return vec![
            "NATS_URL=memory: is only for the undivided binary: separate processes need nats-server".to_owned(),
        ];
    }
    let Ok(address) = Address::parse(urls) else { return vec!["NATS_URL is not a NATS URL".to_owned()] };
    let servers: Vec<_> = address.servers.iter().filter_map(|server| Url::parse(server).ok()).collect();
    let mut found = Vec::new();
    if servers.iter().any(|server| !matches!(server.scheme(), "nats" | "tls")) {
        found.push("NATS_URL must start with nats:// or tls://".to_owned());
    }
    if is_production && address.credentials.is_none() {
        found.push(
            "NATS_URL has no credentials, production refuses a bus that everybody may use: nats://user:password@host"
                .to_owned(),
        );
    }
    let in_clear = |server: &Url| server.scheme() != "tls" && !is_loopback(server);
    if is_production && servers.iter().any(in_clear) {
        found.push(
            "NATS_URL is plain text and not on loopback, production refuses it: tls://user:password@host".to_owned(),
        );
    }
    found
}

fn is_loopback(server: &Url) -> bool {
    // Of a scheme that the crate doesn't know, addresses are names to it.
    let host = server.host_str().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
    host == "localhost" || address.is_ok_and(|address| address.is_loopback())
}

fn bad_url() -> BusError {
    BusError::Refused("not a NATS URL".to_owned())
}

fn percent_decoded(text: &str) -> Result<String, BusError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first == b'%' {
            let (hex, tail) = rest.split_at_checked(2).ok_or_else(bad_url)?;
            let hex = std::str::from_utf8(hex).map_err(|_| bad_url())?;
            bytes.push(u8::from_str_radix(hex, 16).map_err(|_| bad_url())?);
            rest = tail;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).map_err(|_| bad_url())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credentials_leave_the_url() {
        let address = Address::parse("nats://a%40b:p%3Aw@one:4222, two:4223").expect("URLs");
        assert_eq!(address.servers, ["nats://one:4222", "nats://two:4223"]);
        assert_eq!(address.credentials, Some(("a@b".to_owned(), Some("p:w".to_owned()))));
        let token = Address::parse("tls://tok@one").expect("a URL");
        assert_eq!((token.servers, token.credentials), (vec!["tls://one".to_owned()], Some(("tok".to_owned(), None))));
    }

    #[test]
    fn r_sec_6_production_wants_credentials_and_off_loopback_tls() {
        let cases = [
            ("nats://127.0.0.1:4222", 1, 0),
            ("nats://u:p@127.0.0.1:4222", 0, 0),
            ("nats://u:p@[::1]:4222,nats://localhost", 0, 0),
            ("tls://token@nats.example", 0, 0),
            ("nats://u:p@nats.example", 1, 0),
            ("nats://u:p@127.0.0.1, nats://10.0.0.1", 1, 0),
            ("nats.example:4222", 2, 0),
            ("http://u:p@127.0.0.1", 1, 1),
            ("memory:", 1, 1),
            ("nats://", 1, 1),
        ];
        for (urls, production, dev) in cases {
            let found = [true, false].map(|is_production| url_problems(urls, is_production));
            assert_eq!(found.each_ref().map(Vec::len), [production, dev], "{urls}: {found:?}");
            assert!(found.iter().flatten().all(|problem| problem.contains("NATS_URL") && !problem.contains("u:p")));
        }
    }

    #[test]
    fn nonsense_is_refused_without_repeating_it() {
        for bad in ["", "nats://", "nats://u:%zz@h", "http:secret@"] {
            let error = Address::parse(bad).map(|_| ()).expect_err(bad).to_string();
            assert!(!error.contains("secret") && error.contains("NATS URL"), "{error}");
        }
    }
}
