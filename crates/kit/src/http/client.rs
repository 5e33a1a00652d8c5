//! Whose request it is: the peer's, or whom a proxy that we trust names.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use http::{HeaderMap, HeaderName};
use ipnet::IpNet;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// What one subscriber line has at least: who owns a network of these owns every address in it.
const V6_NETWORK: u32 = 64;

/// Proxies whose `X-Forwarded-For` is believed; anybody else's is text that the client made up.
#[derive(Debug, Clone, Default)]
pub struct TrustedProxies(Vec<IpNet>);

impl TrustedProxies {
    /// These networks.
    pub fn new(networks: impl Into<Vec<IpNet>>) -> Self {
        Self(networks.into())
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The nearest address that is no proxy of ours. Each proxy appends whom it was called by, so the list is read from its
    /// end, as far as those who wrote it are trusted.
    pub fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let lines = headers.get_all(FORWARDED_FOR).iter().rev();
        let mut hops = lines.flat_map(|line| line.to_str().unwrap_or_default().rsplit(',').map(address));
        let mut client = peer.to_canonical();
        while self.trusts(client)
            && let Some(Some(hop)) = hops.next()
        {
            client = hop;
        }
        client
    }

    fn trusts(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }
}

/// `10.0.0.0/8`, or one address.
///
/// # Errors
/// It is neither.
pub fn network(text: &str) -> Result<IpNet, String> {
    let one = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse().or_else(|_| one()).map_err(|_| "an address, or a network such as 10.0.0.0/8".to_owned())
}

/// Some proxies add the port.
fn address(hop: &str) -> Option<IpAddr> {
    let hop = hop.trim();
    let with_port = || hop.parse::<SocketAddr>().map(|address| address.ip());
    hop.parse::<IpAddr>().or_else(|_| with_port()).ok().map(|address| address.to_canonical())
}

/// What is counted as one client.
pub(super) fn counted_as(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(_) => address,
        IpAddr::V6(address) => {
            let network = address.to_bits() >> (Ipv6Addr::BITS - V6_NETWORK) << (Ipv6Addr::BITS - V6_NETWORK);
            Ipv6Addr::from_bits(network).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(trusted: &[&str], peer: &str, forwarded: &[&str]) -> String {
        let networks: Vec<_> = trusted.iter().map(|text| network(text).unwrap()).collect();
        let mut headers = HeaderMap::new();
        for line in forwarded {
            headers.append(FORWARDED_FOR, line.parse().unwrap());
        }
        TrustedProxies::new(networks).client(peer.parse().unwrap(), &headers).to_string()
    }

    #[test]
    fn n_24_a_forged_header_is_not_believed_unless_the_proxy_is_trusted() {
        assert_eq!(client(&[], "192.0.2.1", &["198.51.100.7"]), "192.0.2.1");
        assert_eq!(client(&["10.0.0.0/8"], "192.0.2.1", &["198.51.100.7"]), "192.0.2.1");
        assert_eq!(client(&["10.0.0.0/8"], "10.1.2.3", &["198.51.100.7"]), "198.51.100.7");
        assert_eq!(client(&["10.0.0.0/8"], "10.1.2.3", &["1.1.1.1, 198.51.100.7"]), "198.51.100.7", "forged before");
        assert_eq!(client(&["10.0.0.0/8"], "10.1.2.3", &["1.1.1.1", "198.51.100.7, 10.9.9.9"]), "198.51.100.7");
        assert_eq!(client(&["10.0.0.0/8"], "10.1.2.3", &[]), "10.1.2.3");
        assert_eq!(client(&["10.0.0.0/8"], "10.1.2.3", &["198.51.100.7, nonsense"]), "10.1.2.3");
        assert_eq!(client(&["::1"], "::1", &["[2001:db8::7]:443"]), "2001:db8::7");
        assert_eq!(client(&["127.0.0.1"], "::ffff:127.0.0.1", &["198.51.100.7:9"]), "198.51.100.7");
    }

    #[test]
    fn a_line_with_its_own_network_is_one_client() {
        let counted = |text: &str| counted_as(text.parse().unwrap()).to_string();
        assert_eq!(counted("2001:db8:1:2:3:4:5:6"), "2001:db8:1:2::");
        assert_eq!(counted("192.0.2.9"), "192.0.2.9");
    }
}
