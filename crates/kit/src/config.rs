//! Configuration that several binaries share: one small struct per concern, every problem reported at once.

use std::net::SocketAddr;

use ipnet::IpNet;
use secrecy::{ExposeSecret, SecretString};

use crate::{
    http::{
        Limits, Origins,
        client::{TrustedProxies, network},
        origins::origin,
    },
    probes::MetricsAccess,
};

/// The master key of `AURA_ENV=dev` when none is set. Production refuses it.
pub const DEV_MASTER_KEY: &str = "aura-development-master-key-do-not-use";
/// The platform secret of `AURA_ENV=dev` when none is set. Production refuses it.
pub const DEV_PLATFORM_SECRET: &str = "aura-development-platform-secret-do-not-use";
/// Shortest secret in bytes: HS256 and the derivation of keys want 256 bits.
const MIN_SECRET_BYTES: usize = 32;

/// Problems found in a configuration, reported together.
#[derive(Debug, Default)]
pub struct Problems(Vec<String>);

impl Problems {
    /// Adds one.
    pub fn add(&mut self, problem: impl Into<String>) {
        self.0.push(problem.into());
    }

    /// Adds several.
    pub fn extend(&mut self, problems: impl IntoIterator<Item = String>) {
        self.0.extend(problems);
    }

    /// Adds one unless `value` is there and not empty. `name` is the environment variable.
    pub fn require(&mut self, name: &str, value: Option<&SecretString>) {
        if value.is_none_or(|value| value.expose_secret().is_empty()) {
            self.add(format!("{name} is required"));
        }
    }

    /// What was found.
    pub fn list(&self) -> &[String] {
        &self.0
    }

    /// A secret of production: set, at least 32 bytes, not the one of development.
    fn require_secret(&mut self, name: &str, value: Option<&SecretString>, dev: &str) {
        let Some(value) = value else { return self.add(format!("{name} is required with AURA_ENV=production")) };
        if value.expose_secret() == dev {
            self.add(format!("{name} is the key of development, production refuses it"));
        } else if value.expose_secret().len() < MIN_SECRET_BYTES {
            self.add(format!("{name} must have at least {MIN_SECRET_BYTES} bytes"));
        }
    }
}

/// `AURA_ENV`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Environment {
    /// Refuses every short cut.
    Production,
    /// Allows short cuts (fixed keys, …).
    Dev,
}

/// Where the platform is.
#[derive(Debug, Clone, clap::Args)]
pub struct PlatformArgs {
    /// The platform database, `postgres://…`. Required.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    pub database_url: Option<SecretString>,
    /// The bus; `memory:` = in-process, only for the undivided binary.
    #[arg(
        long,
        env = "NATS_URL",
        hide_env_values = true,
        value_name = "URL",
        default_value = "nats://127.0.0.1:4222",
        hide_default_value = false
    )]
    pub nats_url: SecretString,
    /// Encrypts project secrets at rest, at least 32 bytes. Required in production.
    #[arg(long, env = "AURA_MASTER_KEY", hide_env_values = true, value_name = "KEY")]
    pub master_key: Option<SecretString>,
    /// `dev` allows short cuts.
    #[arg(long = "environment", env = "AURA_ENV", value_enum, default_value = "production")]
    pub env: Environment,
}

impl PlatformArgs {
    /// Adds what is wrong.
    pub fn check(&self, problems: &mut Problems) {
        problems.require("DATABASE_URL", self.database_url.as_ref());
        match self.env {
            Environment::Production => {
                problems.require_secret("AURA_MASTER_KEY", self.master_key.as_ref(), DEV_MASTER_KEY);
            }
            Environment::Dev => {}
        }
    }

    /// Whether short cuts are refused.
    pub fn is_production(&self) -> bool {
        self.env == Environment::Production
    }

    /// The platform database's URL; empty only if [`Self::check`] was not heeded.
    pub fn database_url(&self) -> &str {
        self.database_url.as_ref().map_or("", |url| url.expose_secret())
    }

    /// The bus's URL.
    pub fn nats_url(&self) -> &str {
        self.nats_url.expose_secret()
    }

    /// The master key, with `AURA_ENV=dev` the one of development when none is set.
    pub fn master_key(&self) -> SecretString {
        self.master_key.clone().unwrap_or_else(|| DEV_MASTER_KEY.into())
    }
}

/// The secret of platform keys, for the binaries that take them.
#[derive(Debug, Clone, clap::Args)]
pub struct PlatformKeyArgs {
    /// HS256 secret of platform keys, at least 32 bytes. Required in production.
    #[arg(long, env = "AURA_PLATFORM_JWT_SECRET", hide_env_values = true, value_name = "SECRET")]
    pub platform_jwt_secret: Option<SecretString>,
}

impl PlatformKeyArgs {
    /// Adds what is wrong.
    pub fn check(&self, env: Environment, problems: &mut Problems) {
        if env == Environment::Production {
            let secret = self.platform_jwt_secret.as_ref();
            problems.require_secret("AURA_PLATFORM_JWT_SECRET", secret, DEV_PLATFORM_SECRET);
        }
    }

    /// The secret, with `AURA_ENV=dev` the one of development when none is set.
    pub fn secret(&self) -> SecretString {
        self.platform_jwt_secret.clone().unwrap_or_else(|| DEV_PLATFORM_SECRET.into())
    }
}

/// How end users' tokens of other issuers are verified.
#[derive(Debug, Clone, clap::Args)]
pub struct JwksArgs {
    /// Reads projects' key sets from the loopback, by http as well, and from nowhere else: for development and tests.
    #[arg(long, env = "AURA_JWKS_LOOPBACK", action = clap::ArgAction::Set, default_value_t = false, num_args = 0..=1,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(), value_name = "BOOL")]
    pub jwks_loopback: bool,
}

impl JwksArgs {
    /// Adds what is wrong: production asks public addresses only (R-SEC-2).
    pub fn check(&self, env: Environment, problems: &mut Problems) {
        if env == Environment::Production && self.jwks_loopback {
            problems.add("AURA_JWKS_LOOPBACK is a short cut of development, production refuses it");
        }
    }
}

/// What a listener may do.
#[derive(Debug, Clone, clap::Args)]
pub struct ListenArgs {
    /// Something in front of us speaks TLS: allows production to listen on a public address.
    #[arg(long, env = "AURA_BEHIND_TLS", action = clap::ArgAction::Set, default_value_t = false, num_args = 0..=1,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(), value_name = "BOOL")]
    pub behind_tls: bool,
    /// /metrics asks for this as a bearer token. In production a public address shows none without it.
    #[arg(long, env = "AURA_METRICS_TOKEN", hide_env_values = true, value_name = "TOKEN")]
    pub metrics_token: Option<SecretString>,
}

impl ListenArgs {
    /// Adds what is wrong: in production a public address must be behind TLS (R-SEC-4). `name` is the variable that
    /// holds the address.
    pub fn check(&self, env: Environment, name: &str, address: SocketAddr, problems: &mut Problems) {
        if env == Environment::Production && !address.ip().is_loopback() && !self.behind_tls {
            problems.add(format!(
                "{name}={address} is public and plain text: set AURA_BEHIND_TLS=true if a proxy adds TLS"
            ));
        }
    }
}

impl ListenArgs {
    /// Who may read the metrics at `address`.
    pub fn metrics(&self, env: Environment, address: SocketAddr) -> MetricsAccess {
        match self.metrics_token.clone().filter(|token| !token.expose_secret().is_empty()) {
            Some(token) => MetricsAccess::Token(token),
            None if env == Environment::Production && !address.ip().is_loopback() => MetricsAccess::Nobody,
            None => MetricsAccess::Everybody,
        }
    }
}

/// Web pages that may open sockets and streams.
#[derive(Debug, Clone, clap::Args)]
pub struct OriginArgs {
    /// Origins of the pages, separated by commas, such as https://app.example.com; * is every page.
    #[arg(long, env = "AURA_ALLOWED_ORIGINS", value_delimiter = ',', default_value = "*", value_parser = origin,
        value_name = "ORIGINS")]
    pub allowed_origins: Vec<String>,
    /// Browsers may send cookies with event streams, for a proxy in front that signs in by them.
    #[arg(long, env = "AURA_CORS_CREDENTIALS", action = clap::ArgAction::Set, default_value_t = false, num_args = 0..=1,
        default_missing_value = "true", value_parser = clap::builder::BoolishValueParser::new(), value_name = "BOOL")]
    pub cors_credentials: bool,
}

impl OriginArgs {
    fn is_any(&self) -> bool {
        self.allowed_origins.iter().any(|origin| origin == "*")
    }

    /// Adds what is wrong: no browser takes credentials with `*`, and what would answer to every page as it asks must not
    /// be had by a mistake either (R-SEC-4).
    pub fn check(&self, problems: &mut Problems) {
        if self.cors_credentials && self.is_any() {
            problems.add("AURA_CORS_CREDENTIALS with AURA_ALLOWED_ORIGINS=* would give every page its visitor's cookies: list the origins");
        }
    }

    /// The origins.
    pub fn origins(&self) -> Origins {
        match self.is_any() {
            true => Origins::any(),
            false => Origins::listed(self.allowed_origins.clone(), self.cors_credentials),
        }
    }
}

/// How often a client may ask.
#[derive(Debug, Clone, clap::Args)]
pub struct LimitArgs {
    /// Requests a second that one address may make for long, ten times as many at once; 0 = no limit.
    #[arg(long, env = "AURA_RATE_LIMIT_ADDRESS", default_value_t = 2000, value_name = "PER_SECOND")]
    pub rate_limit_address: u32,
    /// Networks of the proxies in front, separated by commas: whom they name in X-Forwarded-For is the client. Anybody
    /// else's word for it is ignored.
    #[arg(long, env = "AURA_TRUSTED_PROXIES", value_delimiter = ',', value_parser = network, value_name = "NETWORKS")]
    pub trusted_proxies: Vec<IpNet>,
}

/// The same for the control plane, which knows whose a key is.
#[derive(Debug, Clone, clap::Args)]
pub struct KeyLimitArgs {
    /// Requests a second to /v1 that one key may make for long, ten times as many at once; 0 = no limit.
    #[arg(long, env = "AURA_RATE_LIMIT_KEY", default_value_t = 500, value_name = "PER_SECOND")]
    pub rate_limit_key: u32,
}

impl LimitArgs {
    /// The limits. Behind a proxy of which nothing is known all clients have one address, so there addresses aren't limited.
    pub fn limits(&self, listening: &ListenArgs, per_key: Option<&KeyLimitArgs>) -> Limits {
        let unknown = listening.behind_tls && self.trusted_proxies.is_empty();
        if unknown && self.rate_limit_address > 0 {
            tracing::warn!(
                "AURA_BEHIND_TLS is set and AURA_TRUSTED_PROXIES is not: requests are not limited by address, since all have \
                 the proxy's"
            );
        }
        let per_address = if unknown { 0 } else { self.rate_limit_address };
        let per_key = per_key.map_or(0, |args| args.rate_limit_key);
        Limits::new(per_address, per_key, TrustedProxies::new(self.trusted_proxies.clone()))
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Cli {
        #[command(flatten)]
        platform: PlatformArgs,
        #[command(flatten)]
        key: PlatformKeyArgs,
    }

    fn problems(args: &[&str]) -> Vec<String> {
        let cli = Cli::try_parse_from([&["aura"], args].concat()).expect("parses");
        let mut problems = Problems::default();
        cli.platform.check(&mut problems);
        cli.key.check(cli.platform.env, &mut problems);
        problems.0
    }

    #[test]
    fn r_sec_4_production_refuses_missing_and_development_secrets_all_at_once() {
        let found = problems(&["--database-url=", "--master-key", DEV_MASTER_KEY, "--platform-jwt-secret=short"]);
        assert_eq!(found.len(), 3, "{found:?}");
        assert!(found[1].contains("development") && found[2].contains("32 bytes"), "{found:?}");
        assert!(problems(&["--database-url=postgres://x", "--environment=dev"]).is_empty());
    }

    #[test]
    fn r_sec_4_production_listens_in_public_only_behind_tls() {
        let check = |env, address: &str, behind_tls| {
            let mut problems = Problems::default();
            ListenArgs { behind_tls, metrics_token: None }.check(env, "X", address.parse().unwrap(), &mut problems);
            problems.0.len()
        };
        assert_eq!(check(Environment::Production, "0.0.0.0:1", false), 1);
        assert_eq!(check(Environment::Production, "[::]:1", false), 1);
        assert_eq!(check(Environment::Production, "0.0.0.0:1", true), 0);
        assert_eq!(check(Environment::Production, "127.0.0.1:1", false), 0);
        assert_eq!(check(Environment::Dev, "0.0.0.0:1", false), 0);
    }

    #[test]
    fn n_28_production_shows_its_metrics_in_public_to_nobody_without_the_token() {
        let access = |env, address: &str, token: &str| {
            let metrics_token = Some(token.into());
            ListenArgs { behind_tls: true, metrics_token }.metrics(env, address.parse().unwrap())
        };
        assert!(matches!(access(Environment::Production, "0.0.0.0:1", ""), MetricsAccess::Nobody));
        assert!(matches!(access(Environment::Production, "0.0.0.0:1", "t"), MetricsAccess::Token(_)));
        assert!(matches!(access(Environment::Production, "127.0.0.1:1", ""), MetricsAccess::Everybody));
        assert!(matches!(access(Environment::Dev, "0.0.0.0:1", ""), MetricsAccess::Everybody));
    }

    #[test]
    fn r_sec_2_production_reads_no_key_sets_of_the_loopback() {
        let check = |env, jwks_loopback| {
            let mut problems = Problems::default();
            JwksArgs { jwks_loopback }.check(env, &mut problems);
            problems.0.len()
        };
        assert_eq!(check(Environment::Production, true), 1);
        assert_eq!(check(Environment::Production, false), 0);
        assert_eq!(check(Environment::Dev, true), 0);
    }

    #[test]
    fn secrets_are_not_printed() {
        let cli = Cli::try_parse_from(["aura", "--database-url=postgres://u:hunter2@h", "--nats-url=nats://hunter2@h"]);
        assert!(!format!("{cli:?}").contains("hunter2"));
    }
}
