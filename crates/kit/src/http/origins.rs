//! Which web pages may use a surface from a browser.

use http::{HeaderMap, HeaderValue, Uri, header};

/// Origins that are let in. Whoever sends none isn't a page of a browser, and has its key to show.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Origins {
    /// `None` = every page; then credentials are never allowed.
    listed: Option<Vec<String>>,
    credentials: bool,
}

impl Origins {
    /// Every page: what it may do its key says.
    pub fn any() -> Self {
        Self::default()
    }

    /// These alone, as [`origin`] returns them. With `credentials` a browser also sends cookies, for a proxy in front that
    /// signs in by them.
    pub fn listed(origins: Vec<String>, credentials: bool) -> Self {
        Self { listed: Some(origins), credentials }
    }

    /// Whether the page that sent these headers is let in: by its whole origin, never by a part of it.
    pub fn allow(&self, headers: &HeaderMap) -> bool {
        match (&self.listed, headers.get(header::ORIGIN)) {
            (None, _) | (_, None) => true,
            (Some(listed), Some(sent)) => listed.iter().any(|origin| origin.as_bytes() == sent.as_bytes()),
        }
    }

    /// Tells the browser that the page may read the answer.
    pub fn write(&self, request: &HeaderMap, answer: &mut HeaderMap) {
        if self.listed.is_none() {
            answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, HeaderValue::from_static("*"));
        } else if let Some(sent) = request.get(header::ORIGIN).filter(|_| self.allow(request)) {
            answer.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, sent.clone());
            answer.insert(header::VARY, HeaderValue::from_static("origin"));
            if self.credentials {
                answer.insert(header::ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
            }
        }
    }
}

/// An origin as browsers write it, `https://app.example.com` or `http://localhost:3000`; or `*`.
///
/// # Errors
/// It is neither.
pub fn origin(text: &str) -> Result<String, String> {
    let wrong = || format!("{text} is no origin: scheme://host or scheme://host:port, and nothing behind");
    let lower = text.trim().to_ascii_lowercase();
    if lower == "*" {
        return Ok(lower);
    }
    let uri = lower.parse::<Uri>().map_err(|_| wrong())?;
    let (Some(scheme @ ("http" | "https")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
        return Err(wrong());
    };
    let host = match (scheme, authority.as_str()) {
        ("https", host) => host.strip_suffix(":443").unwrap_or(host),
        (_, host) => host.strip_suffix(":80").unwrap_or(host),
    };
    let bare = format!("{scheme}://{authority}");
    if bare == lower && !host.contains(['@', '*']) { Ok(format!("{scheme}://{host}")) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(sent: &str) -> HeaderMap {
        HeaderMap::from_iter([(header::ORIGIN, sent.parse().unwrap())])
    }

    #[test]
    fn n_7_an_origin_is_matched_whole() {
        let origins = Origins::listed(vec![origin("https://good.example").unwrap()], false);
        assert!(origins.allow(&headers("https://good.example")));
        assert!(origins.allow(&HeaderMap::new()), "no browser");
        for evil in [
            "https://evil.example",
            "null",
            "https://good.example.evil.example",
            "https://evilgood.example",
            "http://good.example",
            "https://good.example:8443",
            "https://good.example/",
            "*",
            "",
        ] {
            assert!(!origins.allow(&headers(evil)), "{evil}");
            assert!(Origins::any().allow(&headers(evil)), "{evil}");
        }
    }

    #[test]
    fn r_sec_4_credentials_are_never_allowed_to_every_page() {
        let answer = |origins: &Origins, sent| {
            let mut answer = HeaderMap::new();
            origins.write(&headers(sent), &mut answer);
            let text = |name| answer.get(name).map(|value: &HeaderValue| value.to_str().unwrap().to_owned());
            (text(header::ACCESS_CONTROL_ALLOW_ORIGIN), text(header::ACCESS_CONTROL_ALLOW_CREDENTIALS))
        };
        let (good, yes) = (Some("https://good.example".to_owned()), Some("true".to_owned()));
        assert_eq!(answer(&Origins::any(), "https://evil.example"), (Some("*".to_owned()), None));
        let listed = Origins::listed(vec!["https://good.example".to_owned()], true);
        assert_eq!(answer(&listed, "https://good.example"), (good, yes));
        assert_eq!(answer(&listed, "https://evil.example"), (None, None));
    }

    #[test]
    fn origins_are_written_as_browsers_do() {
        assert_eq!(origin("HTTPS://App.Example:443").unwrap(), "https://app.example");
        assert_eq!(origin("http://localhost:3000").unwrap(), "http://localhost:3000");
        for bad in ["app.example", "https://app.example/", "https://*.example", "ftp://a", "https://u@a", "null", ""] {
            assert!(origin(bad).is_err(), "{bad}");
        }
    }
}
