use fallible_iterator::FallibleIterator;
use postgres_protocol::{
    authentication::{
        md5_hash,
        sasl::{ChannelBinding, SCRAM_SHA_256, ScramSha256},
    },
    message::{
        backend::{AuthenticationSaslBody, Message},
        frontend,
    },
};

use super::wire::Wire;
use crate::SourceError;

/// Answers the server until it is content: trust, cleartext, md5, SCRAM-SHA-256.
pub(super) async fn authenticate(wire: &mut Wire, user: &str, password: Option<&[u8]>) -> Result<(), SourceError> {
    let wanted = || password.ok_or(SourceError::Auth("the server wants a password and the URL has none"));
    match wire.message().await? {
        Message::AuthenticationOk => return Ok(()),
        Message::AuthenticationCleartextPassword => send_password(wire, wanted()?)?,
        Message::AuthenticationMd5Password(body) => {
            let hash = md5_hash(user.as_bytes(), wanted()?, body.salt());
            send_password(wire, hash.as_bytes())?;
        }
        Message::AuthenticationSasl(body) => scram(wire, &body, wanted()?).await?,
        _ => return Err(SourceError::Auth("the server wants a method that is not supported")),
    }
    wire.flush().await?;
    match wire.message().await? {
        Message::AuthenticationOk => Ok(()),
        _ => Err(SourceError::Auth("the server went on before it said ok")),
    }
}

fn send_password(wire: &mut Wire, password: &[u8]) -> Result<(), SourceError> {
    frontend::password_message(password, &mut wire.output).map_err(|_| SourceError::Auth("the password contains NUL"))
}

async fn scram(wire: &mut Wire, body: &AuthenticationSaslBody, password: &[u8]) -> Result<(), SourceError> {
    let offered = body.mechanisms().any(|mechanism| Ok(mechanism == SCRAM_SHA_256));
    if !offered.unwrap_or(false) {
        return Err(SourceError::Auth("the server doesn't offer SCRAM-SHA-256"));
    }
    let refused = |_| SourceError::Auth("SCRAM failed");
    let mut scram = ScramSha256::new(password, ChannelBinding::unsupported());
    let first = frontend::sasl_initial_response(SCRAM_SHA_256, scram.message(), &mut wire.output);
    first.map_err(refused)?;
    wire.flush().await?;
    let Message::AuthenticationSaslContinue(body) = wire.message().await? else {
        return Err(SourceError::Auth("SCRAM broke off"));
    };
    scram.update(body.data()).map_err(refused)?;
    frontend::sasl_response(scram.message(), &mut wire.output).map_err(refused)?;
    wire.flush().await?;
    let Message::AuthenticationSaslFinal(body) = wire.message().await? else {
        return Err(SourceError::Auth("SCRAM broke off"));
    };
    // Proves that the server knows the password, too.
    scram.finish(body.data()).map_err(refused)
}
