//! TLS between gateways and controllers: 1.3 only, both sides with certificates of one authority, names in URI SANs
//! (`sluice://<group>/<gateway>`, `sluice://<group>/controller`).
//!
//! Invariant: a certificate is read when a connection is made, so that a renewed one counts from the next connection on and
//! open ones go on until the gateway's certificate expires. One that cannot be used never takes the place of one that can.
//! Where a name stands, only the name counts: a controller may have any address.
//! Deliberately not here: what a gateway of that name may do (`server`), and sockets (`incoming`).

mod credential;
mod identity;
mod material;
mod verify;

use std::sync::Arc;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::UnixTime;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, ServerConfig, version};

pub use credential::Credential;
pub use identity::{CONTROLLER, Identity, identities};
use material::Parsed;
pub use material::{Material, TlsError};
use verify::ControllerVerifier;

/// What HTTP/2 is called in the handshake.
const ALPN: &[u8] = b"h2";

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// What a controller takes connections with.
#[derive(Clone, Debug)]
pub struct Acceptance {
    /// For handshakes.
    pub config: Arc<ServerConfig>,
    /// What it verifies gateways by, for as long as they are connected.
    pub gateways: Arc<dyn ClientCertVerifier>,
}

/// What a controller of `group` takes connections with.
///
/// # Errors
/// When the material is not what gateways of the group would accept.
pub fn acceptance(material: &Material, group: &str) -> Result<Acceptance, TlsError> {
    let parsed = material.parse()?;
    let unusable = |error| TlsError::Unusable { from: material.from.clone(), error };
    let wanted = Identity::new(group, CONTROLLER);
    expect_name(material, &parsed, |found| found.contains(&wanted), &wanted.to_string())?;
    let roots = Arc::new(parsed.roots);
    // As gateways will: better told now than by each of them.
    let verifier = ControllerVerifier::new(Arc::clone(&roots), group);
    verifier.check(&parsed.chain[0], &parsed.chain[1..], UnixTime::now()).map_err(unusable)?;
    let gateways = WebPkiClientVerifier::builder_with_provider(roots, provider()).build();
    let gateways = gateways.map_err(|error| unusable(rustls::Error::General(error.to_string())))?;
    let builder = ServerConfig::builder_with_provider(provider()).with_protocol_versions(&[&version::TLS13]).map_err(unusable)?;
    let config = builder.with_client_cert_verifier(Arc::clone(&gateways)).with_single_cert(parsed.chain, parsed.key);
    let mut config = config.map_err(unusable)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Acceptance { config: Arc::new(config), gateways })
}

/// What `gateway` dials controllers with, and the group that its certificate is of.
///
/// # Errors
/// When the material is not what controllers of the group would accept.
pub fn client_config(material: &Material, gateway: &str) -> Result<(ClientConfig, String), TlsError> {
    let parsed = material.parse()?;
    let unusable = |error| TlsError::Unusable { from: material.from.clone(), error };
    let is_ours = |identity: &&Identity| identity.name == gateway;
    let expected = format!("sluice://GROUP/{gateway}");
    expect_name(material, &parsed, |found| found.iter().any(|identity| is_ours(&identity)), &expected)?;
    let group = identities(&parsed.chain[0]).iter().find(is_ours).map(|identity| identity.group.clone()).unwrap_or_default();
    let roots = Arc::new(parsed.roots);
    let controllers = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), provider()).build();
    let controllers = controllers.map_err(|error| unusable(rustls::Error::General(error.to_string())))?;
    controllers.verify_client_cert(&parsed.chain[0], &parsed.chain[1..], UnixTime::now()).map_err(unusable)?;
    let verifier = Arc::new(ControllerVerifier::new(roots, &group));
    let builder = ClientConfig::builder_with_provider(provider()).with_protocol_versions(&[&version::TLS13]).map_err(unusable)?;
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = builder.with_client_auth_cert(parsed.chain, parsed.key).map_err(unusable)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok((config, group))
}

fn expect_name(
    material: &Material,
    parsed: &Parsed,
    is_there: impl FnOnce(&[Identity]) -> bool,
    expected: &str,
) -> Result<(), TlsError> {
    let found = identities(&parsed.chain[0]);
    if is_there(&found) {
        return Ok(());
    }
    let found = if found.is_empty() { "none".to_owned() } else { Identity::list(&found) };
    Err(TlsError::Name { from: material.from.clone(), expected: expected.to_owned(), found })
}

#[cfg(test)]
pub(crate) mod tests;
