//! Opening a stream to the server: name look-up, registered socket, TLS. Both kinds of connection start here.

use std::{
    net::SocketAddr,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::BytesMut;
use rustls::{
    ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpSocket, UnixSocket},
};
use tokio_postgres::config::Host;
use tokio_rustls::TlsConnector;

use crate::{
    SourceError, SourceUrl,
    sockets::{Registered, Sockets},
    url::TlsMode,
};

/// A dead peer is noticed after about 25 s without an answer: 10 s, then 3 probes every 5 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// Unacknowledged data for this long breaks the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(30);

trait Stream: AsyncRead + AsyncWrite + Send + Sync + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Sync + Unpin> Stream for T {}

/// A connected stream, encrypted or not, and its registration.
pub(crate) struct Transport {
    stream: Box<dyn Stream>,
    _registered: Option<Registered>,
}

/// Connects to the first server of the URL that answers. The caller sets the deadline.
pub(crate) async fn open(url: &SourceUrl, sockets: Option<&Sockets>) -> Result<Transport, SourceError> {
    let config = url.config();
    let mut failure = SourceError::Url("names no host");
    for (index, host) in config.get_hosts().iter().enumerate() {
        // One port serves all hosts, as in libpq.
        let port = config.get_ports().get(index).or_else(|| config.get_ports().first()).copied().unwrap_or(5432);
        match open_host(url, host, port, sockets).await {
            Ok(transport) => return Ok(transport),
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

async fn open_host(
    url: &SourceUrl,
    host: &Host,
    port: u16,
    sockets: Option<&Sockets>,
) -> Result<Transport, SourceError> {
    match host {
        Host::Unix(directory) => open_unix(directory, port, sockets).await,
        Host::Tcp(name) => {
            let addresses = tokio::net::lookup_host((name.as_str(), port)).await;
            let mut failure = SourceError::Url("the host has no address");
            for address in addresses.map_err(SourceError::io("look up the host"))? {
                match open_tcp(address, sockets).await {
                    Ok(transport) => return secure(transport, url.tls(), name).await,
                    Err(error) => failure = error,
                }
            }
            Err(failure)
        }
    }
}

async fn open_unix(directory: &Path, port: u16, sockets: Option<&Sockets>) -> Result<Transport, SourceError> {
    let socket = UnixSocket::new_stream().map_err(SourceError::io("open socket"))?;
    let registered = sockets.map(|sockets| sockets.register(&socket)).transpose()?;
    let path = directory.join(format!(".s.PGSQL.{port}"));
    let stream = socket.connect(path).await.map_err(SourceError::io("connect"))?;
    registered.as_ref().map(Registered::check).transpose()?;
    Ok(Transport { stream: Box::new(stream), _registered: registered })
}

async fn open_tcp(address: SocketAddr, sockets: Option<&Sockets>) -> Result<Transport, SourceError> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4(),
        SocketAddr::V6(_) => TcpSocket::new_v6(),
    };
    let socket = socket.map_err(SourceError::io("open socket"))?;
    let registered = sockets.map(|sockets| sockets.register(&socket)).transpose()?;
    tune(&SockRef::from(&socket)).map_err(SourceError::io("set socket options"))?;
    let stream = socket.connect(address).await.map_err(SourceError::io("connect"))?;
    registered.as_ref().map(Registered::check).transpose()?;
    Ok(Transport { stream: Box::new(stream), _registered: registered })
}

fn tune(socket: &SockRef<'_>) -> std::io::Result<()> {
    let probes = TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL);
    socket.set_tcp_keepalive(&probes.with_retries(KEEPALIVE_RETRIES))?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    socket.set_tcp_nodelay(true)
}

async fn secure(mut plain: Transport, mode: &TlsMode, host: &str) -> Result<Transport, SourceError> {
    if *mode == TlsMode::Disable {
        return Ok(plain);
    }
    let mut request = BytesMut::new();
    postgres_protocol::message::frontend::ssl_request(&mut request);
    plain.write_all(&request).await.map_err(SourceError::io("request TLS"))?;
    // One byte at a time: anything behind the answer would have been injected before encryption.
    match plain.read_u8().await.map_err(SourceError::io("request TLS"))? {
        b'S' => encrypt(plain, mode, host).await,
        _ if *mode == TlsMode::Prefer => Ok(plain),
        _ => Err(SourceError::Tls("the server doesn't offer it".to_owned())),
    }
}

async fn encrypt(plain: Transport, mode: &TlsMode, host: &str) -> Result<Transport, SourceError> {
    let config = client_config(mode).await?;
    let name = ServerName::try_from(host.to_owned()).map_err(|_| SourceError::Tls("bad server name".to_owned()))?;
    let stream = TlsConnector::from(Arc::new(config)).connect(name, plain.stream).await;
    let stream = stream.map_err(|error| SourceError::Tls(error.to_string()))?;
    Ok(Transport { stream: Box::new(stream), _registered: plain._registered })
}

async fn client_config(mode: &TlsMode) -> Result<ClientConfig, SourceError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider)).with_safe_default_protocol_versions();
    let builder = builder.map_err(|error| SourceError::Tls(error.to_string()))?;
    Ok(match mode {
        TlsMode::Verify(path) => builder.with_root_certificates(roots(path.as_deref()).await?).with_no_client_auth(),
        _ => {
            let unverified = Arc::new(Unverified(provider));
            builder.dangerous().with_custom_certificate_verifier(unverified).with_no_client_auth()
        }
    })
}

async fn roots(path: Option<&Path>) -> Result<RootCertStore, SourceError> {
    let bad = |_| SourceError::Tls("sslrootcert is not a PEM file of certificates".to_owned());
    let certificates = match path {
        Some(path) => {
            let pem = tokio::fs::read(path).await.map_err(SourceError::io("read sslrootcert"))?;
            CertificateDer::pem_slice_iter(&pem).collect::<Result<Vec<_>, _>>().map_err(bad)?
        }
        None => tokio::task::spawn_blocking(|| rustls_native_certs::load_native_certs().certs)
            .await
            .map_err(|_| SourceError::Tls("can't read the system's certificates".to_owned()))?,
    };
    let mut store = RootCertStore::empty();
    store.add_parsable_certificates(certificates);
    if store.is_empty() { Err(SourceError::Tls("no root certificates".to_owned())) } else { Ok(store) }
}

/// `sslmode=prefer` and `require`: encrypted, whoever the peer is, as libpq does it without a root certificate.
#[derive(Debug)]
struct Unverified(Arc<CryptoProvider>);

impl ServerCertVerifier for Unverified {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

impl AsyncRead for Transport {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Transport {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
