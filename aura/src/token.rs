use std::{path::PathBuf, time::Duration};

use anyhow::{Context, Result, bail};
use aura_auth::{KeyRole, Minter};
use aura_domain::ProjectId;
use aura_kit::Problems;
use aura_store::{MasterKey, ProjectAuth, Store};
use secrecy::{ExposeSecret, SecretString};
use serde_json::{Map, Value};

/// Prints a token: an end user's, an API key of a project, or a platform key.
#[derive(Debug, clap::Args)]
pub(crate) struct TokenOptions {
    /// Data directory of a `dev` whose project and secrets to use.
    #[arg(long, value_name = "DIR", default_value = "./.aura")]
    data_dir: PathBuf,
    /// The platform database; without it the data directory counts.
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    database_url: Option<SecretString>,
    /// The key that unseals the project's secret.
    #[arg(long, env = "AURA_MASTER_KEY", hide_env_values = true, value_name = "KEY", requires = "database_url")]
    master_key: Option<SecretString>,
    /// Signs platform keys.
    #[arg(long, env = "AURA_PLATFORM_JWT_SECRET", hide_env_values = true, value_name = "SECRET")]
    platform_jwt_secret: Option<SecretString>,
    /// The project's id or name.
    #[arg(long, default_value = "demo")]
    project: String,
    /// What it may do.
    #[arg(long, value_enum, default_value = "authenticated")]
    role: TokenRole,
    /// Subject of an end user's token.
    #[arg(long)]
    sub: Option<String>,
    /// More claims of an end user's token, a JSON object.
    #[arg(long, value_name = "JSON", value_parser = claims, default_value = "{}")]
    claims: Claims,
    /// Life of an end user's token or platform key, in seconds.
    #[arg(long, value_name = "SECONDS", default_value_t = 3600)]
    lifetime: u64,
}

/// What a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum TokenRole {
    Authenticated,
    Anon,
    ServiceRole,
    PlatformAdmin,
}

#[derive(Debug, Clone)]
struct Claims(Map<String, Value>);

fn claims(text: &str) -> Result<Claims, String> {
    serde_json::from_str(text).map(Claims).map_err(|error| format!("not a JSON object: {error}"))
}

/// Where the secrets come from.
struct Secrets {
    database_url: String,
    master_key: String,
    platform_jwt_secret: Option<SecretString>,
}

pub(crate) async fn run(options: TokenOptions) -> Result<()> {
    let secrets = options.secrets()?;
    let lifetime = Duration::from_secs(options.lifetime);
    let token = match options.role {
        TokenRole::PlatformAdmin => {
            let secret = secrets.platform_jwt_secret.context("AURA_PLATFORM_JWT_SECRET is required")?;
            Minter::new(&secret).platform_key(lifetime)?
        }
        TokenRole::Anon => key(&secrets.project(&options.project).await?, KeyRole::Anon)?,
        TokenRole::ServiceRole => key(&secrets.project(&options.project).await?, KeyRole::ServiceRole)?,
        TokenRole::Authenticated => {
            let auth = secrets.project(&options.project).await?;
            let subject = options.sub.context("--sub is required")?;
            Minter::new(&auth.jwt_secret).user_token(auth.project.id, &subject, options.claims.0, lifetime)?
        }
    };
    print(&token);
    Ok(())
}

impl TokenOptions {
    /// Adds what is wrong.
    pub(crate) fn check(&self, problems: &mut Problems) {
        if matches!(self.role, TokenRole::Authenticated) && self.sub.is_none() {
            problems.add(
                "--sub names the end user: aura-realtime token --sub a11ce000-0000-4000-8000-000000000001 (alice of the \
                 demo); other tokens are of a --role",
            );
        }
    }

    fn secrets(&self) -> Result<Secrets> {
        let Some(url) = &self.database_url else { return self.secrets_of_dev() };
        let master_key = self.master_key.as_ref().context("AURA_MASTER_KEY is required with DATABASE_URL")?;
        Ok(Secrets {
            database_url: url.expose_secret().to_owned(),
            master_key: master_key.expose_secret().to_owned(),
            platform_jwt_secret: self.platform_jwt_secret.clone(),
        })
    }

    fn secrets_of_dev(&self) -> Result<Secrets> {
        let dev = self.json("dev.json")?;
        let kept = self.json("secrets.json")?;
        let text = |file: &Value, name: &str| {
            file[name].as_str().map(str::to_owned).with_context(|| format!("{name} is missing in the data directory"))
        };
        Ok(Secrets {
            database_url: text(&dev, "platform_database_url")?,
            master_key: text(&kept, "master_key")?,
            platform_jwt_secret: Some(text(&kept, "platform_jwt_secret")?.into()),
        })
    }

    fn json(&self, name: &str) -> Result<Value> {
        let file = self.data_dir.join(name);
        let text = std::fs::read(&file).with_context(|| {
            format!("can't read {}: name a data directory of `aura-realtime dev`, or set DATABASE_URL", file.display())
        })?;
        serde_json::from_slice(&text).with_context(|| format!("{} is damaged", file.display()))
    }
}

impl Secrets {
    /// By id or name.
    async fn project(&self, project: &str) -> Result<ProjectAuth> {
        let store = Store::connect(&self.database_url, MasterKey::new(&self.master_key)?).await?;
        let id: Option<ProjectId> = match project.parse() {
            Ok(id) => Some(id),
            Err(_) => store.project_by_name(project).await?.map(|project| project.id),
        };
        let auth = match id {
            Some(id) => store.project_auth(id).await?,
            None => None,
        };
        auth.with_context(|| format!("there is no project {project}"))
    }
}

/// Signed anew with a live key's id: as good as the one that was handed out.
fn key(auth: &ProjectAuth, role: KeyRole) -> Result<String> {
    let Some(key) = auth.rules.keys.iter().find(|key| key.role.as_str() == role.as_str()) else {
        bail!("the project has no {} key left", role.as_str());
    };
    Ok(Minter::new(&auth.jwt_secret).project_key(auth.project.id, key.id, role)?)
}

#[expect(clippy::print_stdout, reason = "the command's answer")]
fn print(token: &str) {
    println!("{token}");
}
