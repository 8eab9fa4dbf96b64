//! The keys of section `fleet`: the replication of flows between gateways.
//!
//! Invariant: without `fleet.listen` nothing is replicated, and the other keys of the section are refused.
//! Not here: the replication (`fleet::replication`), and keys and partners that a controller names.

use std::fs::File;
use std::io::Read as _;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use control::config::{Field, Located, Section};
use proto::limits::{PARTNERS_MAX, REPLICATION_PORT};
use proto::{GroupKey, KEY_BYTES};

use super::election::{Election, Elector};
use super::state_source::SourceKeys;

/// Default age at which a flow is replicated: most connections of a web service are over by then, and need no replica.
const AFTER: Duration = Duration::from_secs(1);
const AFTER_MIN: Duration = Duration::from_millis(100);
/// A flow that is younger is lost with its gateway, so a longer time is hardly meant.
const AFTER_MAX: Duration = Duration::from_secs(60);
/// 32 bytes of base64 are 44, and there are at most two keys; more is not read.
const KEY_FILE_BYTES_MAX: u64 = 256;
/// Most keys of the file: the present one, and the one before it or after it while a fleet changes its key.
const KEYS_MAX: usize = 2;
/// Permissions that others must not have.
const OF_OTHERS: u32 = 0o007;

/// How flows are replicated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replication {
    /// Where partners reach this gateway, by TCP and UDP.
    pub listen: SocketAddr,
    /// The age at which a flow is replicated.
    pub after: Duration,
    /// The partners; none: those that the controller names.
    pub partners: Vec<SocketAddr>,
    /// The keys; none: those of the controller.
    pub key: Option<KeyFile>,
}

impl Default for Replication {
    fn default() -> Self {
        let listen = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), REPLICATION_PORT);
        Self { listen, after: AFTER, partners: Vec::new(), key: None }
    }
}

impl Replication {
    /// Whether a controller has to name the partners, or the key.
    #[must_use]
    pub fn needs_membership(&self) -> bool {
        self.partners.is_empty() || self.key.is_none()
    }
}

/// Keys, and the file that they were read from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyFile {
    /// The file.
    pub path: PathBuf,
    /// One or two keys. A session takes the first one that both sides have.
    pub keys: Vec<GroupKey>,
}

/// Reads key `fleet`.
pub(super) fn take(top: &mut Section<'_>, election: &Election, snat: &[Located<IpAddr>]) -> Option<Replication> {
    let mut section = top.section("fleet");
    let listen = section.listen_tcp("listen");
    let after = section.duration("replicate", AFTER_MIN..=AFTER_MAX, AFTER);
    let partners = partners(&mut section);
    let key = section.field("key").filter(|field| !field.is_empty()).and_then(|field| key_file(&field, &section.reader.base()));
    let Some(listen) = listen else {
        if !partners.is_empty() || key.is_some() {
            section.problem_of(
                "listen",
                format!("missing, expected where partners reach this gateway, such as 10.0.0.2:{REPLICATION_PORT}"),
            );
        }
        section.finish();
        return None;
    };
    let address = listen.value.ip();
    if !is_reachable(address, &partners) {
        let message =
            format!("found {address}, expected an address of this machine at which partners on other machines reach it");
        section.problem_of("listen", message);
    }
    if election.elector != Elector::Keepalived {
        let message = "needs `announce: {election: keepalived}`: the owner of a group of VIPs tells the others about its flows";
        section.problem_of("listen", message);
    }
    snat_addresses_suffice(&section, election, snat);
    section.finish();
    Some(Replication { listen: listen.value, after, partners, key })
}

/// Whether partners could reach this gateway at an address. On one machine, loopback serves all.
fn is_reachable(address: IpAddr, partners: &[SocketAddr]) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local(),
        IpAddr::V6(address) => address.is_unicast_link_local(),
    };
    let are_all_here = !partners.is_empty() && partners.iter().all(|partner| partner.ip().is_loopback());
    !(address.is_unspecified() || address.is_multicast() || is_link_local || address.is_loopback() && !are_all_here)
}

/// SNAT addresses belong to groups of VIPs: each group needs one of each family that is used.
fn snat_addresses_suffice(section: &Section<'_>, election: &Election, snat: &[Located<IpAddr>]) {
    for (family, is_v4) in [("IPv4", true), ("IPv6", false)] {
        let count = snat.iter().filter(|located| located.value.is_ipv4() == is_v4).count();
        if count > 0 && count < usize::from(election.groups) {
            let addresses = if count == 1 { "address" } else { "addresses" };
            let message = format!(
                "needs an address of `snat.addresses` for each group of VIPs: found {count} {family} {addresses} for {} groups; set \
                 `announce: {{groups: {count}}}`, or give more, the same on all gateways",
                election.groups
            );
            section.problem_of("listen", message);
        }
    }
}

fn partners(section: &mut Section<'_>) -> Vec<SocketAddr> {
    let mut partners = Vec::new();
    let items = section.items("partners", "addresses of partners");
    if let Some(item) = items.get(PARTNERS_MAX) {
        item.problem(format!("found {} partners, expected at most {PARTNERS_MAX}", items.len()));
    }
    for item in items {
        let legal = |address: &SocketAddr| address.port() > 0 && !address.ip().is_unspecified() && !address.ip().is_multicast();
        let expected = format!("ADDRESS:PORT, such as 10.0.0.3:{REPLICATION_PORT}");
        let Some(partner) = item.parse(expected, |text| text.parse().ok().filter(legal)) else { continue };
        if partners.contains(&partner) {
            item.problem(format!("found {partner} a second time; name it once"));
        }
        partners.push(partner);
    }
    partners
}

fn key_file(field: &Field<'_>, base: &Path) -> Option<KeyFile> {
    let read = |text: &str| {
        let path = std::path::absolute(base.join(text)).map_err(|error| error.to_string())?;
        let keys = read_keys(&path).map_err(|error| format!("{error}; `head -c 32 /dev/urandom | base64 >FILE` makes one"))?;
        Ok::<_, String>(KeyFile { path, keys })
    };
    field.try_parse("a file with 32 bytes in base64, or two lines of them", read)
}

fn read_keys(path: &Path) -> Result<Vec<GroupKey>, String> {
    let unreadable = |error| format!("which cannot be read: {error}");
    let file = File::open(path).map_err(unreadable)?;
    let mode = file.metadata().map_err(unreadable)?.mode();
    if mode & OF_OTHERS != 0 {
        return Err(format!("which everybody may read (mode {:04o}); `chmod 0600` it", mode & 0o7777));
    }
    let mut text = String::new();
    file.take(KEY_FILE_BYTES_MAX).read_to_string(&mut text).map_err(unreadable)?;
    let lines: Vec<&str> = text.trim().lines().collect();
    if lines.len() > KEYS_MAX {
        return Err(format!("which has more than {KEYS_MAX} lines, each of which is a key"));
    }
    let of_line = |number: usize| if lines.len() > 1 { format!(" in line {}", number + 1) } else { String::new() };
    // An empty file holds no key, rather than none at all.
    let texts = if lines.is_empty() { vec![""] } else { lines.clone() };
    let keys =
        texts.iter().enumerate().map(|(number, line)| parse_key(line).map_err(|error| format!("{error}{}", of_line(number))));
    let keys = keys.collect::<Result<Vec<_>, _>>()?;
    match keys[..] {
        [first, second] if first == second => Err("whose two lines are the same key".to_owned()),
        _ => Ok(keys),
    }
}

/// A key in base64.
fn parse_key(text: &str) -> Result<GroupKey, String> {
    let bytes = STANDARD.decode(text.trim()).map_err(|_| "which is not base64".to_owned())?;
    let found = bytes.len();
    let bytes = bytes.try_into().map_err(|_| format!("which holds {found} bytes, expected {KEY_BYTES}"))?;
    Ok(GroupKey::new(bytes))
}

/// Gateways with controllers of their own need a key of their own too: each controller makes another one.
pub(super) fn check_source(top: &Section<'_>, replication: Option<&Replication>, source: &SourceKeys) {
    let is_keyless = replication.is_some_and(|replication| !replication.partners.is_empty() && replication.key.is_none());
    if is_keyless && matches!(source, SourceKeys::Embedded(..)) {
        let message = "missing, expected a file with the key that the partners have too: they would not know the key of the \
                       controller in this process";
        top.problem_of("fleet.key", message);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt as _;

    use crate::settings::{Settings, SourceChoice};

    use super::*;

    /// A gateway with two groups of VIPs and these lines.
    struct Lab(tempfile::TempDir);

    impl Lab {
        fn new(key: &str, mode: u32) -> Self {
            let lab = Self(tempfile::tempdir().unwrap());
            let path = lab.0.path().join("fleet.key");
            std::fs::write(&path, key).unwrap();
            std::fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
            lab
        }

        fn read(&self, fleet: &str) -> Result<Settings, String> {
            self.read_with(fleet, "announce: {election: keepalived, groups: 2}", "[10.0.0.3, 10.0.0.4]")
        }

        fn read_with(&self, fleet: &str, announce: &str, snat: &str) -> Result<Settings, String> {
            let text = format!(
                "name: edge-1\nports: [{{name: uplink, device: net_tap0, addresses: [192.0.2.2/24]}}]\nsnat: {{addresses: {snat}}}\n\
                 {announce}\nfleet: {{{fleet}}}\nmanifests: m\n"
            );
            let file = self.0.path().join("sluice.yaml");
            std::fs::write(&file, text).unwrap();
            Settings::read(&file, &SourceChoice::File).map_err(|invalid| invalid.to_string())
        }
    }

    fn key() -> String {
        STANDARD.encode([7; KEY_BYTES])
    }

    #[test]
    fn flows_are_replicated_where_a_gateway_listens_for_partners() {
        let lab = Lab::new(&format!("{}\n", key()), 0o600);
        assert_eq!(lab.read("").unwrap().replication, None);
        let settings = lab.read("listen: 192.0.2.2:9437").unwrap();
        let expected = Replication { listen: "192.0.2.2:9437".parse().unwrap(), ..Replication::default() };
        assert_eq!(settings.replication, Some(expected));
        let settings =
            lab.read("listen: 192.0.2.2:9437, replicate: 300ms, partners: [\"192.0.2.3:9437\"], key: fleet.key").unwrap();
        let replication = settings.replication.clone().unwrap();
        assert_eq!((replication.after, replication.partners.len()), (Duration::from_millis(300), 1));
        assert_eq!(replication.key.unwrap().keys, [GroupKey::new([7; KEY_BYTES])]);
        let effective = settings.effective();
        assert!(!effective.contains(&key()) && effective.contains("fleet.key"), "{effective}");
        std::fs::write(lab.0.path().join("effective.yaml"), &effective).unwrap();
        assert_eq!(Settings::read(&lab.0.path().join("effective.yaml"), &SourceChoice::File).as_ref(), Ok(&settings));
    }

    #[test]
    fn what_cannot_work_is_refused_with_what_to_do() {
        let lab = Lab::new(&key(), 0o600);
        let partners = "listen: 192.0.2.2:9437, key: fleet.key, partners";
        let rows = [
            ("listen: 192.0.2.2", "`fleet.listen`: found `192.0.2.2`, expected IP:PORT"),
            ("listen: 0.0.0.0:9437", "found 0.0.0.0, expected an address of this machine"),
            ("listen: 127.0.0.1:9437", "found 127.0.0.1, expected an address of this machine at which partners on other"),
            ("listen: \"[::1]:9437\", key: fleet.key, partners: [\"192.0.2.3:1\"]", "found ::1, expected an address"),
            ("listen: \"[fe80::1]:9437\"", "found fe80::1, expected an address"),
            ("partners: [\"192.0.2.3:9437\"]", "`fleet.listen`: missing, expected where partners reach this gateway"),
            ("key: fleet.key", "`fleet.listen`: missing"),
            ("listen: 192.0.2.2:9437, partners: [\"192.0.2.3:9437\"]", "`fleet.key`: missing, expected a file"),
            (&format!("{partners}: [192.0.2.3]"), "expected ADDRESS:PORT, such as 10.0.0.3:9437"),
            (&format!("{partners}: [\"192.0.2.3:1\", \"192.0.2.3:1\"]"), "found 192.0.2.3:1 a second time"),
            ("listen: 192.0.2.2:9437, key: other", "which cannot be read: No such file"),
            ("listen: 192.0.2.2:9437, replicate: 1ms", "expected a duration from 100ms to 1m"),
            ("listne: 192.0.2.2:9437", "did you mean `listen`?"),
        ];
        for (fleet, expected) in rows {
            let error = lab.read(fleet).unwrap_err();
            assert!(error.contains(expected), "{fleet}: {error}");
        }
        let listen = "listen: 192.0.2.2:9437";
        let error = lab.read_with(listen, "announce: {groups: 2}", "[10.0.0.3, 10.0.0.4]").unwrap_err();
        assert!(error.contains("needs `announce: {election: keepalived}`"), "{error}");
        let election = "announce: {election: keepalived}";
        let error = lab.read_with(listen, election, "[10.0.0.3, 10.0.0.4]").unwrap_err();
        assert!(error.contains("found 2 IPv4 addresses for 16 groups; set `announce: {groups: 2}`"), "{error}");
        let error = lab.read_with(listen, "announce: {election: keepalived, groups: 2}", "[10.0.0.3, 10.0.0.4, 'fd00::3']");
        assert!(error.unwrap_err().contains("found 1 IPv6 address for 2 groups"));
    }

    #[test]
    fn the_key_may_come_from_a_controller_that_the_file_or_a_flag_names() {
        let lab = Lab::new(&key(), 0o600);
        let fleet = "listen: 192.0.2.2:9437, partners: [\"192.0.2.3:9437\"]";
        let file = lab.0.path().join("sluice.yaml");
        assert!(lab.read(fleet).unwrap_err().contains("`fleet.key`: missing"));
        let text = std::fs::read_to_string(&file).unwrap();
        let read = |source: &str, choice| {
            std::fs::write(&file, text.replace("manifests: m\n", source)).unwrap();
            Settings::read(&file, &choice).map_err(|invalid| invalid.to_string())
        };
        // As `replay` and `doctor` read it.
        let replay = || SourceChoice::Replay("/".into());
        for choice in [SourceChoice::File, replay()] {
            read("controller: {urls: ['unix:/c.sock']}\n", choice).unwrap();
        }
        read("", replay()).unwrap();
        assert!(read("manifests: m\n", replay()).unwrap_err().contains("`fleet.key`: missing"));
    }

    #[test]
    fn snat_addresses_of_all_groups_serve_the_same_links() {
        let lab = Lab::new(&key(), 0o600);
        let (listen, election) = ("listen: 192.0.2.2:9437", "announce: {election: keepalived, groups: 2}");
        let link = "static: {links: [{port: uplink, tags: [7], addresses: [10.7.0.2/24]}]}";
        let read = |snat: &str| lab.read_with(listen, &format!("{election}\n{link}"), snat);
        // In no prefix, in one prefix, and one beyond the groups.
        for snat in ["[10.0.0.3, 10.0.0.4]", "[10.7.0.3, 10.7.0.4]", "[10.7.0.3, 10.7.0.4, 192.0.2.9]"] {
            read(snat).unwrap();
        }
        let error = read("[192.0.2.8, 10.7.0.4]").unwrap_err();
        let expected = "`snat.addresses[1]`: found 10.7.0.4, which belongs to VIP group 1 and serves VLAN 7 of port `uplink`, while \
                        192.0.2.8 of group 0 serves port `uplink`";
        assert!(error.contains(expected) && error.contains("from the prefix of one port or link, or from none"), "{error}");
        let error = read("[10.7.0.3, 10.0.0.4]").unwrap_err();
        assert!(error.contains("VIP group 1 and serves every link, while 10.7.0.3"), "{error}");
        // Without replication they belong to no group.
        lab.read_with("", &format!("{election}\n{link}"), "[192.0.2.8, 10.7.0.4]").unwrap();
    }

    #[test]
    fn gateways_of_one_machine_may_listen_on_loopback() {
        let lab = Lab::new(&key(), 0o600);
        lab.read("listen: 127.0.0.1:9437, key: fleet.key, partners: [\"127.0.0.2:9437\"]").unwrap();
    }

    #[test]
    fn a_key_is_32_bytes_that_not_everybody_may_read() {
        let rows = [
            (key(), 0o644, "everybody may read (mode 0644); `chmod 0600` it"),
            ("AAAA".to_owned(), 0o600, "holds 3 bytes, expected 32"),
            ("not base64!".to_owned(), 0o600, "which is not base64"),
            (String::new(), 0o600, "holds 0 bytes"),
            (format!("{}\nAAAA\n", key()), 0o600, "holds 3 bytes, expected 32 in line 2"),
            (format!("{}\n\n{}\n", key(), key()), 0o600, "has more than 2 lines"),
            (format!("{}\n{}\n", key(), key()), 0o600, "whose two lines are the same key"),
        ];
        for (text, mode, expected) in rows {
            let error = Lab::new(&text, mode).read("listen: 192.0.2.2:9437, key: fleet.key").unwrap_err();
            assert!(error.contains(expected) && error.contains("`fleet.key`: found"), "{error}");
            assert!(!error.contains(&key()) && error.contains("head -c 32 /dev/urandom | base64"), "{error}");
        }
        Lab::new(&key(), 0o640).read("listen: 192.0.2.2:9437, key: fleet.key").unwrap();
        let two = format!("{}\n{}\n", STANDARD.encode([8; KEY_BYTES]), key());
        let settings = Lab::new(&two, 0o600).read("listen: 192.0.2.2:9437, key: fleet.key").unwrap();
        let keys = settings.replication.unwrap().key.unwrap().keys;
        assert_eq!(keys, [8, 7].map(|byte| GroupKey::new([byte; KEY_BYTES])));
    }
}
