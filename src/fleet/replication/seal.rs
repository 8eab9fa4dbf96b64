//! The handshake and the sealing of a session.
//!
//! The follower offers, the teller answers, both prove that they have the key of the group:
//!
//! ```text
//! follower -> teller   offer:  magic, version, nonce, identity, identifiers of the keys that it has
//! teller -> follower   answer: magic, version, nonce, identity, identifier of the chosen key; proof
//! follower -> teller   proof
//! ```
//!
//! The keys of a session come from the group's key by HKDF-SHA256 (RFC 5869), with the hash of offer and answer as salt:
//! both nonces, both identities and the choice of the key are in it, so a replayed or changed message leads to other keys. A
//! proof is an HMAC by a key of its own for each side. What follows is sealed by AES-256-GCM, with one key for each
//! direction of TCP and of UDP, and a counter as nonce.
//!
//! **Invariant:** a nonce is used once with a key: counters only grow, and each key has one sealer. Nothing prints keys.
//! Not here: I/O.

use std::fmt;
use std::net::SocketAddr;

use proto::{GroupKey, KEY_BYTES};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::digest::{SHA256, digest};
use ring::hkdf::{HKDF_SHA256, Prk, Salt};
use ring::hmac;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::agreement::DIGEST;

const MAGIC: [u8; 8] = *b"sluiceRP";
/// Version of the whole protocol. A gateway refuses another one by name.
pub(super) const VERSION: u8 = 1;
/// Bytes of a tag of AES-GCM.
pub(super) const TAG: usize = 16;
/// Bytes of a proof: HMAC-SHA256.
pub(super) const PROOF: usize = 32;
const NONCE: usize = 32;
const IDENTIFIER: usize = 8;
/// Bytes of the number of a process.
const PROCESS: usize = 8;
/// Most keys that are offered: the present one, and one before it.
pub(super) const KEYS_MAX: usize = 2;
/// Most bytes of an offer or an answer: names have at most 63 bytes, addresses at most 47.
pub(super) const HANDSHAKE_BYTES_MAX: usize = 512;
/// Most messages of one key: 2^32 of 88 blocks are far below the 2^64 blocks at which the tags of AES-GCM would repeat
/// by chance, and at 10,000 a second they last five days. Then the session begins again.
const MESSAGES_MAX: u64 = 1 << 32;

/// Names a session in its datagrams.
pub(super) type SessionId = [u8; 8];

/// Why there is no session.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum SealError {
    #[error("what listens there is no sluiced, or not its port `fleet.listen`")]
    Magic,
    #[error("it speaks version {0} of the replication, this gateway version {VERSION}; upgrade the older one")]
    Version(u8),
    #[error("its handshake makes no sense")]
    Form,
    #[error("it has another key; give all gateways of the group the same `fleet.key`, or the same controller")]
    Key,
    #[error("it does not prove that it has the key of the group")]
    Proof,
    #[error("it has the name of this gateway, {0}; give each gateway its own `name`, and no gateway itself as a partner")]
    Itself(String),
    #[error("a message was changed on its way, or is of another session")]
    Changed,
    #[error("its keys are worn out, a new session follows")]
    WornOut,
    #[error("the system gives no random numbers")]
    Random,
}

/// A gateway, as it says in a handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Identity {
    /// Its name.
    pub(super) name: String,
    /// Where it listens.
    pub(super) address: SocketAddr,
    /// A random number of its process, which counts its batches from 0.
    pub(super) process: [u8; PROCESS],
    /// The digest of what all gateways must have in common.
    pub(super) agreement: [u8; DIGEST],
}

/// Names a key without showing it.
fn identifier(key: &GroupKey) -> [u8; IDENTIFIER] {
    let mut identifier = [0; IDENTIFIER];
    let prk = Salt::new(HKDF_SHA256, b"sluice replication: identifier").extract(key.bytes());
    identifier.copy_from_slice(&expand(&prk, b"identifier")[..IDENTIFIER]);
    identifier
}

fn expand(prk: &Prk, label: &[u8]) -> [u8; KEY_BYTES] {
    let mut output = [0; KEY_BYTES];
    // Fails only for outputs longer than 255 hashes.
    if let Ok(key) = prk.expand(&[label], HKDF_SHA256) {
        let _ = key.fill(&mut output);
    }
    output
}

/// Random bytes: a nonce, or the number of a process.
pub(super) fn random<const N: usize>() -> Result<[u8; N], SealError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| SealError::Random)?;
    Ok(bytes)
}

fn put_text(bytes: &mut Vec<u8>, text: &str) {
    let length = text.len().min(255);
    bytes.push(u8::try_from(length).unwrap_or(255));
    bytes.extend(&text.as_bytes()[..length]);
}

fn put_identity(bytes: &mut Vec<u8>, identity: &Identity) {
    put_text(bytes, &identity.name);
    put_text(bytes, &identity.address.to_string());
    bytes.extend(identity.process);
    bytes.extend(identity.agreement);
}

/// Reads the parts of a handshake.
struct Parts<'a>(&'a [u8]);

impl<'a> Parts<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], SealError> {
        let (part, rest) = self.0.split_at_checked(length).ok_or(SealError::Form)?;
        self.0 = rest;
        Ok(part)
    }

    fn text(&mut self) -> Result<&'a str, SealError> {
        let length = self.take(1)?[0];
        std::str::from_utf8(self.take(length.into())?).map_err(|_| SealError::Form)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], SealError> {
        self.take(N)?.try_into().map_err(|_| SealError::Form)
    }

    fn identity(&mut self) -> Result<Identity, SealError> {
        let name = self.text()?.to_owned();
        let address = self.text()?.parse().map_err(|_| SealError::Form)?;
        Ok(Identity { name, address, process: self.array()?, agreement: self.array()? })
    }

    fn begin(bytes: &'a [u8]) -> Result<Self, SealError> {
        let mut parts = Self(bytes);
        if parts.take(MAGIC.len()).ok() != Some(&MAGIC) {
            return Err(SealError::Magic);
        }
        match parts.take(1)?[0] {
            VERSION => Ok(parts),
            other => Err(SealError::Version(other)),
        }
    }
}

fn begin(nonce: &[u8; NONCE]) -> Vec<u8> {
    [&MAGIC[..], &[VERSION], nonce].concat()
}

/// The follower's offer.
pub(super) fn offer(identity: &Identity, keys: &[GroupKey]) -> Result<Vec<u8>, SealError> {
    let mut bytes = begin(&random()?);
    put_identity(&mut bytes, identity);
    keys.iter().take(KEYS_MAX).for_each(|key| bytes.extend(identifier(key)));
    Ok(bytes)
}

/// The teller's answer to an offer, with its proof; the session, and who the follower is if it proves it.
pub(super) fn answer(
    offer: &[u8],
    identity: &Identity,
    keys: &[GroupKey],
) -> Result<(Vec<u8>, SealedSession, Identity), SealError> {
    let mut parts = Parts::begin(offer)?;
    parts.take(NONCE)?;
    let follower = parts.identity()?;
    if follower.name == identity.name {
        return Err(SealError::Itself(follower.name));
    }
    let offered: Vec<&[u8]> = parts.0.chunks_exact(IDENTIFIER).take(KEYS_MAX).collect();
    let key = keys.iter().find(|key| offered.contains(&&identifier(key)[..])).ok_or(SealError::Key)?;
    let mut answer = begin(&random()?);
    put_identity(&mut answer, identity);
    answer.extend(identifier(key));
    let session = SealedSession::new(key, offer, &answer);
    answer.extend(session.proof(SessionSide::Teller));
    Ok((answer, session, follower))
}

/// The session that an answer to our offer leads to, and who the teller is.
pub(super) fn accept(
    offer: &[u8],
    answer: &[u8],
    identity: &Identity,
    keys: &[GroupKey],
) -> Result<(SealedSession, Identity), SealError> {
    let mut parts = Parts::begin(answer)?;
    parts.take(NONCE)?;
    let teller = parts.identity()?;
    let chosen = parts.take(IDENTIFIER)?;
    let (signed, proof) = answer.split_at(answer.len() - parts.0.len());
    if teller.name == identity.name {
        return Err(SealError::Itself(teller.name));
    }
    let key = keys.iter().take(KEYS_MAX).find(|key| identifier(key) == chosen).ok_or(SealError::Key)?;
    let session = SealedSession::new(key, offer, signed);
    session.check(SessionSide::Teller, proof)?;
    Ok((session, teller))
}

/// A side of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SessionSide {
    /// Owns flows.
    Teller,
    /// Keeps them.
    PartnerFollower,
}

/// The secrets of a session.
pub(super) struct SealedSession {
    prk: Prk,
}

impl fmt::Debug for SealedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SealedSession(..)")
    }
}

impl SealedSession {
    fn new(key: &GroupKey, offer: &[u8], answer: &[u8]) -> Self {
        let transcript = [digest(&SHA256, offer).as_ref(), digest(&SHA256, answer).as_ref()].concat();
        Self { prk: Salt::new(HKDF_SHA256, digest(&SHA256, &transcript).as_ref()).extract(key.bytes()) }
    }

    fn proof_key(&self, side: SessionSide) -> hmac::Key {
        let label: &[u8] = if side == SessionSide::Teller { b"proof of the teller" } else { b"proof of the follower" };
        hmac::Key::new(hmac::HMAC_SHA256, &expand(&self.prk, label))
    }

    /// What only a side with the key can say.
    pub(super) fn proof(&self, side: SessionSide) -> [u8; PROOF] {
        let mut proof = [0; PROOF];
        proof.copy_from_slice(hmac::sign(&self.proof_key(side), &MAGIC).as_ref());
        proof
    }

    /// Checks the proof of the other side, in constant time.
    pub(super) fn check(&self, side: SessionSide, proof: &[u8]) -> Result<(), SealError> {
        hmac::verify(&self.proof_key(side), &MAGIC, proof).map_err(|_| SealError::Proof)
    }

    /// Its name in datagrams.
    pub(super) fn id(&self) -> SessionId {
        let mut id = [0; 8];
        id.copy_from_slice(&expand(&self.prk, b"session")[..8]);
        id
    }

    /// Seals and opens messages by TCP, for this side.
    pub(super) fn stream(&self, side: SessionSide) -> (Sealer, Opener) {
        self.both(side, b"tcp of the teller", b"tcp of the follower")
    }

    /// The same by UDP.
    pub(super) fn datagrams(&self, side: SessionSide) -> (Sealer, Opener) {
        self.both(side, b"udp of the teller", b"udp of the follower")
    }

    fn both(&self, side: SessionSide, teller: &[u8], follower: &[u8]) -> (Sealer, Opener) {
        let (own, other) = if side == SessionSide::Teller { (teller, follower) } else { (follower, teller) };
        (Sealer { key: self.aead(own), counter: 0 }, Opener { key: self.aead(other) })
    }

    /// `None` never happens: the length of the key is that of the algorithm.
    fn aead(&self, label: &[u8]) -> Option<LessSafeKey> {
        UnboundKey::new(&AES_256_GCM, &expand(&self.prk, label)).ok().map(LessSafeKey::new)
    }
}

fn nonce(counter: u64) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    bytes[NONCE_LEN - 8..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// Seals messages of one direction.
pub(super) struct Sealer {
    key: Option<LessSafeKey>,
    counter: u64,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Sealer({})", self.counter)
    }
}

impl Sealer {
    /// Seals a message in place, and returns its counter. `head` is sent with it in the open, and must not change.
    pub(super) fn seal(&mut self, head: &[u8], message: &mut Vec<u8>) -> Result<u64, SealError> {
        let counter = self.counter;
        if counter >= MESSAGES_MAX {
            return Err(SealError::WornOut);
        }
        self.counter += 1;
        let key = self.key.as_ref().ok_or(SealError::WornOut)?;
        key.seal_in_place_append_tag(nonce(counter), Aad::from(head), message).map_err(|_| SealError::WornOut)?;
        Ok(counter)
    }

    /// A datagram: session, counter, sealed message.
    pub(super) fn datagram(&mut self, session: SessionId, mut message: Vec<u8>) -> Result<Vec<u8>, SealError> {
        let head = [session, self.counter.to_be_bytes()].concat();
        self.seal(&head, &mut message)?;
        Ok([head, message].concat())
    }
}

/// Bytes of a datagram beside its message: session, counter, tag.
pub(super) const DATAGRAM_HEAD: usize = 16;

/// The session that a datagram names.
pub(super) fn session_of(datagram: &[u8]) -> Option<SessionId> {
    datagram.first_chunk().copied()
}

/// Opens messages of one direction.
pub(super) struct Opener {
    key: Option<LessSafeKey>,
}

impl fmt::Debug for Opener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Opener(..)")
    }
}

impl Opener {
    /// Opens a sealed message with this counter.
    pub(super) fn open<'a>(&self, counter: u64, head: &[u8], sealed: &'a mut [u8]) -> Result<&'a [u8], SealError> {
        let key = self.key.as_ref().ok_or(SealError::Changed)?;
        key.open_in_place(nonce(counter), Aad::from(head), sealed).map(|message| &*message).map_err(|_| SealError::Changed)
    }

    /// Opens a datagram. Returns its counter and its message.
    pub(super) fn datagram<'a>(&self, datagram: &'a mut [u8]) -> Result<(u64, &'a [u8]), SealError> {
        let (head, sealed) = datagram.split_at_mut_checked(DATAGRAM_HEAD).ok_or(SealError::Changed)?;
        let counter = u64::from_be_bytes(*head.last_chunk().ok_or(SealError::Changed)?);
        Ok((counter, self.open(counter, head, sealed)?))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn identity(n: u8) -> Identity {
        let address = SocketAddr::from(([192, 0, 2, n], 9437));
        Identity { name: format!("edge-{n}"), address, process: [n; PROCESS], agreement: [n; DIGEST] }
    }

    const OLD: GroupKey = GroupKey::new([1; KEY_BYTES]);
    const NEW: GroupKey = GroupKey::new([2; KEY_BYTES]);

    /// The follower's and the teller's session, if all goes well.
    fn handshake(of_follower: &[GroupKey], of_teller: &[GroupKey]) -> Result<(SealedSession, SealedSession), SealError> {
        let offer = offer(&identity(1), of_follower)?;
        let (bytes, told, who) = answer(&offer, &identity(2), of_teller)?;
        assert_eq!(who, identity(1));
        assert!(bytes.len().max(offer.len()) <= HANDSHAKE_BYTES_MAX);
        let (followed, who) = accept(&offer, &bytes, &identity(1), of_follower)?;
        assert_eq!(who, identity(2));
        told.check(SessionSide::PartnerFollower, &followed.proof(SessionSide::PartnerFollower))?;
        Ok((followed, told))
    }

    #[test]
    fn gateways_with_a_common_key_have_a_session_whatever_else_they_have() {
        let rows =
            [(vec![OLD], vec![OLD]), (vec![OLD], vec![NEW, OLD]), (vec![NEW, OLD], vec![OLD]), (vec![NEW, OLD], vec![NEW])];
        for (of_follower, of_teller) in rows {
            let (followed, told) = handshake(&of_follower, &of_teller).unwrap();
            assert_eq!(followed.id(), told.id());
            let (mut sealer, opener) =
                (told.datagrams(SessionSide::Teller).0, followed.datagrams(SessionSide::PartnerFollower).1);
            for counter in 0..3 {
                let mut datagram = sealer.datagram(told.id(), b"news".to_vec()).unwrap();
                assert_eq!(session_of(&datagram), Some(followed.id()));
                assert_eq!(datagram.len(), DATAGRAM_HEAD + 4 + TAG);
                assert_eq!(opener.datagram(&mut datagram), Ok((counter, &b"news"[..])));
            }
        }
        assert_eq!(handshake(&[OLD], &[NEW]).unwrap_err(), SealError::Key);
        assert_eq!(handshake(&[], &[NEW]).unwrap_err(), SealError::Key);
    }

    #[test]
    fn who_only_claims_to_have_the_key_proves_nothing() {
        let offer = offer(&identity(1), &[OLD]).unwrap();
        // It has seen the identifier of the key, but not the key.
        let (mut forged, ..) = answer(&offer, &identity(2), &[OLD]).unwrap();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        assert_eq!(accept(&offer, &forged, &identity(1), &[OLD]).unwrap_err(), SealError::Proof);
        let (mut forged, ..) = answer(&offer, &identity(2), &[OLD]).unwrap();
        let at = forged.len() - PROOF - IDENTIFIER - 1;
        forged[at] ^= 1;
        assert_eq!(accept(&offer, &forged, &identity(1), &[OLD]).unwrap_err(), SealError::Proof, "another agreement");
        let (_, told, _) = answer(&offer, &identity(2), &[OLD]).unwrap();
        let other = handshake(&[OLD], &[OLD]).unwrap().0;
        assert_eq!(
            told.check(SessionSide::PartnerFollower, &other.proof(SessionSide::PartnerFollower)),
            Err(SealError::Proof),
            "of another session"
        );
        assert_eq!(
            told.check(SessionSide::PartnerFollower, &told.proof(SessionSide::Teller)),
            Err(SealError::Proof),
            "reflected"
        );
    }

    #[test]
    fn a_gateway_has_no_session_with_itself_another_version_or_another_program() {
        let own = offer(&identity(2), &[OLD]).unwrap();
        assert_eq!(answer(&own, &identity(2), &[OLD]).unwrap_err(), SealError::Itself("edge-2".to_owned()));
        let mut newer = offer(&identity(1), &[OLD]).unwrap();
        newer[MAGIC.len()] = 9;
        assert_eq!(answer(&newer, &identity(2), &[OLD]).unwrap_err(), SealError::Version(9));
        assert_eq!(answer(b"GET / HTTP/1.1\r\n", &identity(2), &[OLD]).unwrap_err(), SealError::Magic);
    }

    #[test]
    fn messages_of_another_session_direction_or_way_do_not_open() {
        let (_, told) = handshake(&[OLD], &[OLD]).unwrap();
        let (other, _) = handshake(&[OLD], &[OLD]).unwrap();
        let mut sealer = told.datagrams(SessionSide::Teller).0;
        let datagram = sealer.datagram(told.id(), b"news".to_vec()).unwrap();
        let openers = [
            other.datagrams(SessionSide::PartnerFollower).1,
            told.datagrams(SessionSide::Teller).1,
            told.stream(SessionSide::PartnerFollower).1,
        ];
        for opener in openers {
            assert_eq!(opener.datagram(&mut datagram.clone()), Err(SealError::Changed));
        }
    }

    #[test]
    fn keys_wear_out() {
        let (_, told) = handshake(&[OLD], &[OLD]).unwrap();
        let mut sealer = told.datagrams(SessionSide::Teller).0;
        sealer.counter = MESSAGES_MAX;
        assert_eq!(sealer.datagram(told.id(), Vec::new()), Err(SealError::WornOut));
    }

    #[test]
    fn nothing_prints_a_key() {
        let (followed, _) = handshake(&[OLD], &[OLD]).unwrap();
        let (sealer, opener) = followed.stream(SessionSide::PartnerFollower);
        assert_eq!(format!("{followed:?} {sealer:?} {opener:?}"), "SealedSession(..) Sealer(0) Opener(..)");
    }

    proptest! {
        #[test]
        fn changed_or_truncated_datagrams_do_not_open(at in 0..200_usize, bit in 0..8_u32, cut in 0..120_usize) {
            let (followed, told) = handshake(&[OLD], &[OLD]).unwrap();
            let datagram = told.datagrams(SessionSide::Teller).0.datagram(told.id(), vec![7; 64]).unwrap();
            let opener = followed.datagrams(SessionSide::PartnerFollower).1;
            let mut changed = datagram.clone();
            let at = at % changed.len();
            changed[at] ^= 1 << bit;
            prop_assert_eq!(opener.datagram(&mut changed), Err(SealError::Changed));
            let mut short = datagram[..cut.min(datagram.len() - 1)].to_vec();
            prop_assert_eq!(opener.datagram(&mut short), Err(SealError::Changed));
        }

        #[test]
        fn any_handshake_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), is_begun in any::<bool>()) {
            let own = offer(&identity(1), &[OLD]).unwrap();
            let bytes = if is_begun { [&MAGIC[..], &[VERSION], &bytes].concat() } else { bytes };
            prop_assert!(answer(&bytes, &identity(2), &[OLD]).is_err());
            prop_assert!(accept(&own, &bytes, &identity(1), &[OLD]).is_err());
        }
    }
}
