use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::{
    Config,
    config::{SslMode, TargetSessionAttrs},
};

use crate::SourceError;

/// Session settings that make every value's text form the same on every server (R-DEC-1), as `options` of the start-up
/// packet. They come after the URL's own options, so they win.
pub(crate) const PINNED_OPTIONS: &str = "-c DateStyle=ISO -c IntervalStyle=postgres -c TimeZone=UTC \
     -c extra_float_digits=1 -c bytea_output=hex -c search_path=";

/// A parsed `postgres://` URL. `Debug` shows neither password nor user.
#[derive(Clone)]
pub struct SourceUrl {
    config: Arc<Config>,
    tls: TlsMode,
}

/// libpq's `sslmode`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum TlsMode {
    Disable,
    Prefer,
    Require,
    /// `verify-ca` and `verify-full`; both check the name, too. The path is `sslrootcert`, else the system's roots.
    Verify(Option<PathBuf>),
}

impl SourceUrl {
    /// Parses `postgres://user:password@host:port/database?sslmode=…`. `sslmode` is `disable`, `allow` or `prefer` (the
    /// default), `require` (encrypted, not verified, as in libpq), `verify-ca` or `verify-full` (both verify certificate
    /// and name, against `sslrootcert` or the system's roots).
    pub fn parse(url: &str) -> Result<Self, SourceError> {
        if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
            return Err(SourceError::Url("must start with postgres://"));
        }
        let (plain, tls) = split_tls_parameters(url)?;
        // The parser's own error quotes what it could not read, maybe the password.
        let mut config: Config = plain.parse().map_err(|_| SourceError::Url("can't be parsed"))?;
        if config.get_hosts().is_empty() {
            return Err(SourceError::Url("names no host"));
        }
        if config.get_user().is_none() {
            return Err(SourceError::Url("names no user"));
        }
        if !config.get_hostaddrs().is_empty() || config.get_target_session_attrs() != TargetSessionAttrs::Any {
            return Err(SourceError::Url("hostaddr and target_session_attrs are not supported"));
        }
        // TLS is done before the driver sees the stream.
        config.ssl_mode(SslMode::Disable);
        Ok(Self { config: Arc::new(config), tls })
    }

    /// As [`SourceUrl::parse`], from a secret.
    pub fn from_secret(url: &SecretString) -> Result<Self, SourceError> {
        Self::parse(url.expose_secret())
    }

    /// The same server and database with another login.
    pub fn with_login(&self, user: &str, password: &str) -> Self {
        self.with(|config| {
            config.user(user).password(password);
        })
    }

    /// The same whose sessions begin, and are reset to, a time limit for statements.
    pub(crate) fn with_statement_timeout(&self, limit: Duration) -> Self {
        self.with(|config| {
            let own = config.get_options().unwrap_or_default();
            let options = format!("{own} -c statement_timeout={}", limit.as_millis());
            config.options(options);
        })
    }

    /// The same server and login with another database.
    pub fn with_database(&self, database: &str) -> Self {
        self.with(|config| {
            config.dbname(database);
        })
    }

    /// The login.
    pub fn user(&self) -> &str {
        self.config.get_user().unwrap_or_default()
    }

    /// The database; the login's name when the URL has none, as the server does it.
    pub fn database(&self) -> &str {
        self.config.get_dbname().unwrap_or_else(|| self.user())
    }

    /// Host and port of the first server, to name it in a message.
    pub fn endpoint(&self) -> String {
        match (self.config.get_hosts().first(), self.config.get_ports().first()) {
            (Some(tokio_postgres::config::Host::Tcp(host)), port) => format!("{host}:{}", port.unwrap_or(&5432)),
            (Some(tokio_postgres::config::Host::Unix(path)), _) => path.display().to_string(),
            (None, _) => String::new(),
        }
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    pub(crate) fn tls(&self) -> &TlsMode {
        &self.tls
    }

    /// `options` of the start-up packet: the URL's, then ours.
    pub(crate) fn startup_options(&self) -> String {
        match self.config.get_options() {
            Some(own) => format!("{own} {PINNED_OPTIONS}"),
            None => PINNED_OPTIONS.to_owned(),
        }
    }

    fn with(&self, edit: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::clone(&self.config);
        edit(&mut config);
        Self { config: Arc::new(config), tls: self.tls.clone() }
    }
}

impl fmt::Debug for SourceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SourceUrl({}/{})", self.endpoint(), self.database())
    }
}

/// Takes `sslmode` and `sslrootcert` out of the query: the driver's parser doesn't know all of their values.
fn split_tls_parameters(url: &str) -> Result<(String, TlsMode), SourceError> {
    let (base, query) = url.split_once('?').unwrap_or((url, ""));
    let (mut mode, mut root, mut rest) = ("prefer".to_owned(), None, Vec::new());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        match pair.split_once('=') {
            Some(("sslmode", value)) => value.clone_into(&mut mode),
            Some(("sslrootcert", value)) => root = Some(percent_decoded(value)?),
            _ => rest.push(pair),
        }
    }
    let tls = match mode.as_str() {
        "disable" => TlsMode::Disable,
        "allow" | "prefer" => TlsMode::Prefer,
        "require" => TlsMode::Require,
        "verify-ca" | "verify-full" => TlsMode::Verify(root.filter(|path| path != "system").map(PathBuf::from)),
        _ => return Err(SourceError::Url("sslmode must be disable, prefer, require, verify-ca or verify-full")),
    };
    let plain = if rest.is_empty() { base.to_owned() } else { format!("{base}?{}", rest.join("&")) };
    Ok((plain, tls))
}

fn percent_decoded(value: &str) -> Result<String, SourceError> {
    let bad = SourceError::Url("sslrootcert is not valid percent-encoding");
    let mut bytes = Vec::with_capacity(value.len());
    let mut rest = value.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        if byte == b'%' {
            let digits = rest.get(..2).and_then(|hex| std::str::from_utf8(hex).ok());
            let Some(Ok(decoded)) = digits.map(|hex| u8::from_str_radix(hex, 16)) else { return Err(bad) };
            bytes.push(decoded);
            rest = &rest[2..];
        } else {
            bytes.push(byte);
        }
    }
    String::from_utf8(bytes).map_err(|_| bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_shows_no_secret() {
        let url = SourceUrl::parse("postgres://ann:hunter2@db.example:6432/shop?application_name=x").unwrap();
        assert_eq!(format!("{url:?}"), "SourceUrl(db.example:6432/shop)");
        assert_eq!((url.user(), url.database()), ("ann", "shop"));
        let other = url.with_login("bob", "pw").with_database("till");
        assert_eq!((other.user(), other.database()), ("bob", "till"));
        let error = SourceUrl::parse("postgres://ann:hunter2@db:notaport/shop").unwrap_err();
        assert!(!error.to_string().contains("hunter2") && !format!("{error:?}").contains("hunter2"));
    }

    #[test]
    fn every_sslmode_of_libpq_is_understood() {
        let mode = |query: &str| SourceUrl::parse(&format!("postgres://u@h/d{query}")).map(|url| url.tls);
        assert_eq!(mode("").unwrap(), TlsMode::Prefer);
        assert_eq!(mode("?sslmode=disable").unwrap(), TlsMode::Disable);
        assert_eq!(mode("?a=b").map(|_| ()).unwrap_err().to_string(), "source URL: can't be parsed");
        assert_eq!(mode("?connect_timeout=3&sslmode=require").unwrap(), TlsMode::Require);
        let verify = mode("?sslmode=verify-full&sslrootcert=%2Fetc%2Fca.pem").unwrap();
        assert_eq!(verify, TlsMode::Verify(Some(PathBuf::from("/etc/ca.pem"))));
        assert!(mode("?sslmode=loud").is_err());
    }

    #[test]
    fn what_is_missing_is_named() {
        for (url, part) in
            [("mysql://u@h/d", "must start"), ("postgres://h/d", "no user"), ("postgres:///d", "no host")]
        {
            let error = SourceUrl::parse(url).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
