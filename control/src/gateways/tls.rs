//! TLS between gateways and controllers, and of the admin API: 1.3 only, both sides with certificates of one authority.
//! Gateways and controllers have names in URI SANs (`sluice://<group>/<gateway>`, `sluice://<group>/controller`),
//! operators in their subjects.
//!
//! Invariant: certificates are loaded for each connection, so that a renewed one is used from the next connection on.
//! Open connections last until the gateway's certificate expires. An invalid certificate never replaces a valid one.
//! Only the name in the certificate counts; a controller may have any address.
//! Deliberately not here: the rights of a gateway with that name (`server`), and sockets (`listener`).

mod credential;
mod identity;
mod material;
mod operator;
pub mod secret;
mod validity;
mod verify;

use std::sync::Arc;

use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig, version};

pub use credential::Credential;
pub use identity::{CONTROLLER, Identity, identities};
use material::Parsed;
pub use material::{Material, TlsError};
pub use operator::{Operator, Role};
pub use validity::Validity;
use verify::ControllerVerifier;

/// ALPN name of HTTP/2.
const ALPN: &[u8] = b"h2";

/// TLS settings of a controller for incoming connections.
#[derive(Clone, Debug)]
pub struct Acceptance {
    /// For handshakes.
    pub config: Arc<ServerConfig>,
    /// Verifier of gateways or operators, also used while they are connected.
    pub clients: Arc<dyn ClientCertVerifier>,
}

/// TLS settings of a controller of `group` for incoming connections.
///
/// # Errors
/// If gateways of the group would not accept the material.
pub fn acceptance(material: &Material, group: &str) -> Result<Acceptance, TlsError> {
    let parsed = material.parse()?;
    let unusable = |error| TlsError::Unusable { from: material.from.clone(), error };
    let wanted = Identity::new(group, CONTROLLER);
    expect_identity(material, &parsed, |found| *found == wanted, &wanted.to_string())?;
    let roots = Arc::new(parsed.roots);
    // The same check as in gateways, so that the error shows here and not in each of them.
    let verifier = ControllerVerifier::new(Arc::clone(&roots), group);
    verifier.check(&parsed.chain[0], &parsed.chain[1..], UnixTime::now()).map_err(unusable)?;
    accepting(roots, parsed.chain, parsed.key).map_err(unusable)
}

/// TLS settings of the admin API for incoming connections.
///
/// # Errors
/// If the certificate is not valid, or not of the authority.
pub fn operator_acceptance(material: &Material) -> Result<Acceptance, TlsError> {
    let Parsed { roots, chain, key } = material.parse()?;
    let unusable = |error| TlsError::Unusable { from: material.from.clone(), error };
    let roots = Arc::new(roots);
    // Clients check the name too, which only they know.
    verify::check_server(&roots, &chain[0], &chain[1..], UnixTime::now()).map_err(unusable)?;
    accepting(roots, chain, key).map_err(unusable)
}

fn accepting(
    roots: Arc<RootCertStore>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<Acceptance, rustls::Error> {
    let clients = WebPkiClientVerifier::builder_with_provider(roots, verify::provider()).build();
    let clients = clients.map_err(|error| rustls::Error::General(error.to_string()))?;
    let builder = ServerConfig::builder_with_provider(verify::provider()).with_protocol_versions(&[&version::TLS13])?;
    let mut config = builder.with_client_cert_verifier(Arc::clone(&clients)).with_single_cert(chain, key)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok(Acceptance { config: Arc::new(config), clients })
}

/// TLS settings with which `gateway` dials controllers, and the group of its certificate.
///
/// # Errors
/// If controllers of the group would not accept the material.
pub fn client_config(material: &Material, gateway: &str) -> Result<(ClientConfig, String), TlsError> {
    let parsed = material.parse()?;
    let unusable = |error| TlsError::Unusable { from: material.from.clone(), error };
    let expected = format!("sluice://GROUP/{gateway}");
    let Identity { group, .. } = expect_identity(material, &parsed, |found| found.name == gateway, &expected)?;
    let roots = Arc::new(parsed.roots);
    let controllers = WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), verify::provider()).build();
    let controllers = controllers.map_err(|error| unusable(rustls::Error::General(error.to_string())))?;
    controllers.verify_client_cert(&parsed.chain[0], &parsed.chain[1..], UnixTime::now()).map_err(unusable)?;
    let verifier = Arc::new(ControllerVerifier::new(roots, &group));
    let builder =
        ClientConfig::builder_with_provider(verify::provider()).with_protocol_versions(&[&version::TLS13]).map_err(unusable)?;
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = builder.with_client_auth_cert(parsed.chain, parsed.key).map_err(unusable)?;
    config.alpn_protocols = vec![ALPN.to_vec()];
    Ok((config, group))
}

/// The first identity of the certificate that is wanted.
fn expect_identity(
    material: &Material,
    parsed: &Parsed,
    is_wanted: impl Fn(&Identity) -> bool,
    expected: &str,
) -> Result<Identity, TlsError> {
    let found = identities(&parsed.chain[0]);
    if let Some(identity) = found.iter().find(|identity| is_wanted(identity)) {
        return Ok(identity.clone());
    }
    let found = if found.is_empty() { "none".to_owned() } else { Identity::list(&found) };
    Err(TlsError::Name { from: material.from.clone(), expected: expected.to_owned(), found })
}

#[cfg(test)]
pub(crate) mod tests;
