//! Server URLs: async-nats leaves the credentials in a URL unused, and logs the URL.

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
    fn nonsense_is_refused_without_repeating_it() {
        for bad in ["", "nats://", "nats://u:%zz@h", "http:secret@"] {
            let error = Address::parse(bad).map(|_| ()).expect_err(bad).to_string();
            assert!(!error.contains("secret") && error.contains("NATS URL"), "{error}");
        }
    }
}
