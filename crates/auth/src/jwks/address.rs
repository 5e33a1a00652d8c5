//! Whom we may ask: a project's owner chooses the URL, and must not reach with it what only we can reach.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use url::{Host, Url};

/// Longest URL in bytes.
const MAX_URL: usize = 2048;

/// Why a URL is none that keys are read from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Not a URL, or over 2048 bytes.
    #[error("it is not a URL of at most {MAX_URL} bytes")]
    Malformed,
    /// Another scheme than `https`.
    #[error("it must begin with https://")]
    NotHttps,
    /// `user:password@`, or a fragment.
    #[error("it may have neither a user name nor a fragment")]
    Extras,
    /// A private, local or otherwise special address.
    #[error("its host is not a public one")]
    NotPublic,
}

/// Checks what can be seen without a look-up. With `loopback` only the loopback is allowed, and `http`.
pub(super) fn check(text: &str, loopback: bool) -> Result<Url, UrlError> {
    let url = Url::parse(text).ok().filter(|_| text.len() <= MAX_URL).ok_or(UrlError::Malformed)?;
    if url.scheme() != "https" && !(loopback && url.scheme() == "http") {
        return Err(UrlError::NotHttps);
    }
    if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() {
        return Err(UrlError::Extras);
    }
    let ok = match url.host() {
        // A name is judged by what it resolves to, each time; these never lead to anybody else than us.
        Some(Host::Domain(name)) => loopback || !is_local_name(name),
        Some(Host::Ipv4(address)) => is_allowed(address.into(), loopback),
        Some(Host::Ipv6(address)) => is_allowed(address.into(), loopback),
        None => false,
    };
    if ok { Ok(url) } else { Err(UrlError::NotPublic) }
}

fn is_local_name(name: &str) -> bool {
    let name = name.trim_end_matches('.').to_ascii_lowercase();
    !name.contains('.') || [".localhost", ".local", ".internal"].iter().any(|end| name.ends_with(end))
}

pub(super) fn is_allowed(address: IpAddr, loopback: bool) -> bool {
    match address {
        _ if loopback => address.is_loopback(),
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

/// Not in the special-purpose registry of IANA (`IpAddr::is_global` isn't stable).
fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = matches!(
        (a, b, c),
        (0 | 10 | 127 | 224.., ..)
            | (100, 64..=127, _)
            | (169, 254, _)
            | (172, 16..=31, _)
            | (192, 168, _)
            | (192, 0, 0 | 2)
            | (192, 88, 99)
            | (198, 18..=19, _)
            | (198, 51, 100)
            | (203, 0, 113)
    );
    !special
}

/// Global unicast, without what embeds or stands for other addresses (6to4, Teredo, documentation).
fn is_public_v6(address: Ipv6Addr) -> bool {
    match address.segments() {
        [0x2001, 0..=0x1ff, ..] | [0x2001, 0xdb8, ..] | [0x2002, ..] | [0x3fff, 0..=0xfff, ..] => false,
        [first, ..] => first & 0xe000 == 0x2000,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_sec_2_only_public_https_addresses_are_asked_for_keys() {
        for url in ["https://id.example.com/jwks", "https://93.184.216.34/", "https://[2606:4700::1]:8443/k?a=b"] {
            assert!(check(url, false).is_ok(), "{url}");
        }
        for (url, why) in [
            ("http://id.example.com/jwks", UrlError::NotHttps),
            ("file:///etc/passwd", UrlError::NotHttps),
            ("id.example.com", UrlError::Malformed),
            ("https://user:pw@id.example.com/", UrlError::Extras),
            ("https://id.example.com/#x", UrlError::Extras),
            ("https://localhost/", UrlError::NotPublic),
            ("https://metadata.google.internal/", UrlError::NotPublic),
            ("https://nats/", UrlError::NotPublic),
            ("https://127.0.0.1/", UrlError::NotPublic),
            ("https://0x7f.1/", UrlError::NotPublic),
            ("https://2130706433/", UrlError::NotPublic),
            ("https://169.254.169.254/latest/meta-data", UrlError::NotPublic),
            ("https://10.1.2.3/", UrlError::NotPublic),
            ("https://[::1]/", UrlError::NotPublic),
            ("https://[::ffff:127.0.0.1]/", UrlError::NotPublic),
            ("https://[fd00::1]/", UrlError::NotPublic),
        ] {
            assert_eq!(check(url, false).map(|_| ()), Err(why), "{url}");
        }
    }

    #[test]
    fn r_sec_2_special_addresses_are_none_that_a_name_may_lead_to() {
        let special = [
            "0.0.0.0",
            "10.0.0.1",
            "100.64.0.1",
            "127.8.8.8",
            "169.254.1.1",
            "172.16.0.1",
            "172.31.255.255",
            "192.0.0.8",
            "192.0.2.1",
            "192.168.1.1",
            "198.19.0.1",
            "198.51.100.1",
            "203.0.113.1",
            "224.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "::ffff:8.8.8.8",
            "64:ff9b::808:808",
            "2001::1",
            "2001:db8::1",
            "2002:7f00:1::",
            "fc00::1",
            "fe80::1",
            "ff02::1",
        ];
        for address in special {
            assert!(!is_allowed(address.parse().expect("an address"), false), "{address}");
        }
        for address in ["1.1.1.1", "100.63.0.1", "172.32.0.1", "192.167.1.1", "198.20.0.1", "2606:4700:4700::1111"] {
            assert!(is_allowed(address.parse().expect("an address"), false), "{address}");
            assert!(
                !is_allowed(address.parse().expect("an address"), true),
                "{address}: in development the loopback only"
            );
        }
    }
}
