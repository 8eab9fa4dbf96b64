//! The checkpoint: decisions of a leader that its successor must keep. These are the addresses of each Service, the
//! size of each Maglev table, the words in force of each Service that was served, the seed of all tables, and the
//! reservations of freed addresses.
//!
//! Invariant: a plan from the same objects and the checkpoint of the previous plan gives every Service the same
//! addresses and tables. The checkpoint is a hint: addresses that sluice wrote into a status take precedence, and lines
//! that cannot be parsed are skipped. Deliberately not here: where it is stored (`store`), and the allocation
//! (`addresses`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use imbl::OrdMap;
use objects::status::IpMode;
use proto::limits::MAGLEV_SIZES;
use proto::{
    AddressRange, AffinityScope, Announce, Family, Mode, Pool, PoolBgp, Probe, Protocol, Scheduler, ServiceName, Target,
};

/// A Maglev table of a Service: protocol, port and family of its frontend.
pub type TableKey = (Protocol, u16, Family);

/// First line of each text. Texts with another first line are ignored.
const VERSION: &str = "v1";
/// Prefix of the line of a reserved address. The line of a Service begins with its name, which contains a slash.
const RESERVED: &str = "reserved";
/// Prefix of the line of the seed, in the first text.
const SEED: &str = "maglev-seed";
/// Prefix of the line of a pool.
const POOL: &str = "pool";
/// Prefix of the line of the gateways that serve node ports, in the first text.
const NODE_PORTS: &str = "node-ports";
/// Line of a checkpoint that has the words in force of each Service, in the first text. Without it a Service whose line has
/// none may have been refused.
const WORDS: &str = "words";
/// Setting of a Service that was never served, which has no words in force.
const NEVER_SERVED: &str = "words=none";
/// Maximum time of a reservation.
const RESERVED_MAX_S: u64 = 3600;
/// Maximum length of one text, in characters: a ConfigMap holds 1 MiB. Four texts hold 65,536 Services of 55 characters
/// each.
const TEXT_MAX: usize = 900_000;

/// How a Service is forwarded, as far as its settings have words as values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How packets reach backends.
    pub mode: Mode,
    /// Whether backends are endpoints or nodes.
    pub target: Target,
    /// How backends are chosen.
    pub scheduler: Scheduler,
    /// `ipMode` of its status.
    pub ip_mode: IpMode,
    /// Over what affinity is shared.
    pub affinity_scope: AffinityScope,
    /// Protocol of the probe.
    pub probe: Probe,
}

impl Policy {
    /// The words that lines omit. They are part of the format, whatever the defaults of the configuration are.
    const fn usual() -> Self {
        Self {
            mode: Mode::Nat,
            target: Target::Endpoint,
            scheduler: Scheduler::Maglev,
            ip_mode: IpMode::Proxy,
            affinity_scope: AffinityScope::Port,
            probe: Probe::Tcp,
        }
    }

    /// Its words that are not usual.
    fn unusual_words(&self) -> impl Iterator<Item = (&'static str, &'static str)> {
        self.words().into_iter().zip(Self::usual().words()).filter(|(word, usual)| word != usual).map(|(word, _)| word)
    }

    fn words(&self) -> [(&'static str, &'static str); 6] {
        [
            ("mode", self.mode.as_str()),
            ("target", self.target.as_str()),
            ("scheduler", self.scheduler.as_str()),
            ("ip-mode", self.ip_mode.as_str()),
            ("affinity-scope", self.affinity_scope.as_str()),
            ("probe", self.probe.as_str()),
        ]
    }

    fn parse(words: &BTreeMap<&str, &str>) -> Option<Self> {
        let usual = Self::usual();
        let word = |setting: &str, usual: &'static str| words.get(setting).copied().unwrap_or(usual);
        let ip_mode = word("ip-mode", usual.ip_mode.as_str());
        Some(Self {
            mode: word("mode", usual.mode.as_str()).parse().ok()?,
            target: word("target", usual.target.as_str()).parse().ok()?,
            scheduler: word("scheduler", usual.scheduler.as_str()).parse().ok()?,
            ip_mode: [IpMode::Vip, IpMode::Proxy].into_iter().find(|mode| mode.as_str() == ip_mode)?,
            affinity_scope: word("affinity-scope", usual.affinity_scope.as_str()).parse().ok()?,
            probe: word("probe", usual.probe.as_str()).parse().ok()?,
        })
    }
}

/// Decisions for one Service.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Decided {
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// The size of each of its Maglev tables, in entries.
    pub tables: BTreeMap<TableKey, u32>,
    /// The words in force of a Service that was served; they stay if an annotation of it gets an unknown word.
    pub in_force: Option<Policy>,
}

/// A freed address that is reserved for its former holder. Reservations are ordered by expiry.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Reserved {
    /// End of the reservation.
    pub until: Instant,
    /// The address.
    pub address: IpAddr,
    /// Its former holder.
    pub service: ServiceName,
}

/// A checkpoint. Successive checkpoints share unchanged parts.
#[derive(Clone, Debug, Default)]
pub struct Checkpoint {
    /// Grows with every change.
    pub revision: u64,
    /// By Service.
    pub services: OrdMap<ServiceName, Arc<Decided>>,
    /// The reserved addresses.
    pub reserved: Arc<Vec<Reserved>>,
    /// The pools as sent to gateways, by which addresses keep their routes.
    pub pools: Arc<Vec<Pool>>,
    /// The gateways that serve node ports; `None`: an earlier version did not record them.
    pub node_port_gateways: Option<Arc<BTreeSet<String>>>,
    /// The seed of the Maglev tables that was drawn for this installation; none: that of all installations that are older
    /// than such seeds.
    pub maglev_seed: Option<u64>,
}

impl Checkpoint {
    /// Records the decisions for a Service.
    pub(crate) fn put(&mut self, name: &ServiceName, decided: Decided) {
        if decided == Decided::default() {
            return self.remove(name);
        }
        if self.services.get(name).is_none_or(|old| **old != decided) {
            self.services.insert(name.clone(), Arc::new(decided));
            self.revision += 1;
        }
    }

    /// Removes a Service.
    pub(crate) fn remove(&mut self, name: &ServiceName) {
        if self.services.remove(name).is_some() {
            self.revision += 1;
        }
    }

    /// Serializes it into several texts; the hash of its name chooses the text of a Service. `clock` is the time of day
    /// at `now`. A text that would be too long loses reservations first, then pools, then the longest Services, so that a
    /// Service of a thousand ports displaces no others.
    #[must_use]
    pub fn to_texts(&self, count: usize, now: Instant, clock: SystemTime) -> Vec<String> {
        let mut texts: Vec<Vec<String>> = vec![Vec::new(); count.max(1)];
        texts[0].extend(self.maglev_seed.map(seed_line));
        texts[0].extend(self.node_port_gateways.as_deref().map(node_ports_line));
        texts[0].push(WORDS.to_owned());
        let mut put = |name: &ServiceName, line: String| {
            let at = text_of(name, texts.len());
            texts[at].push(line);
        };
        for (name, decided) in &self.services {
            put(name, line(name, decided));
        }
        for pool in self.pools.iter() {
            let line = pool_line(pool);
            put(&ServiceName::new(POOL, &line), line);
        }
        for one in self.reserved.iter() {
            let until = (clock + one.until.saturating_duration_since(now)).duration_since(UNIX_EPOCH).unwrap_or_default();
            put(&one.service, format!("{RESERVED} {} {} {}", one.address, one.service, until.as_secs()));
        }
        texts.into_iter().map(joined).collect()
    }

    /// The first text with this seed, which it does not have yet.
    #[must_use]
    pub fn with_seed(text: &str, seed: u64) -> String {
        let lines = text.lines().filter(|line| *line != VERSION).map(ToOwned::to_owned);
        joined(std::iter::once(seed_line(seed)).chain(lines).collect())
    }

    /// Parses such texts.
    #[must_use]
    pub fn from_texts(texts: &[String], now: Instant, clock: SystemTime) -> Self {
        let clock_s = clock.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let (mut read, mut reserved, mut pools, mut broken) = (Self::default(), Vec::new(), Vec::new(), 0_usize);
        let has_words = texts.iter().flat_map(|text| text.lines()).any(|line| line == WORDS);
        for text in texts {
            let mut lines = text.lines();
            if lines.next().is_some_and(|first| first != VERSION) {
                tracing::warn!("a part of the checkpoint has another version and is ignored");
                continue;
            }
            for line in lines {
                if let Some((name, decided)) = parse_service(line, has_words) {
                    read.put(&name, decided);
                } else if let Some((address, service, until_s)) = parse_reserved(line) {
                    // The limit guards against a clock that was set back.
                    let left = Duration::from_secs(until_s.saturating_sub(clock_s).min(RESERVED_MAX_S));
                    reserved.push(Reserved { address, service, until: now + left });
                } else if let Some(pool) = parse_pool(line) {
                    pools.push(pool);
                } else if let Some(gateways) = parse_node_ports(line) {
                    read.node_port_gateways = Some(Arc::new(gateways));
                } else if let Some(seed) = parse_seed(line) {
                    read.maglev_seed = Some(seed);
                } else if line != WORDS {
                    broken += 1;
                }
            }
        }
        if broken > 0 {
            tracing::warn!(lines = broken, "lines of the checkpoint cannot be parsed and are skipped");
        }
        Self { reserved: Arc::new(reserved), pools: Arc::new(pools), ..read }
    }
}

/// Index of the text of a Service: FNV-1a, which is the same in every build.
fn text_of(name: &ServiceName, count: usize) -> usize {
    usize::try_from(proto::fnv1a(name.to_string().as_bytes()) % u64::try_from(count).unwrap_or(1).max(1)).unwrap_or_default()
}

/// What a line is about, in the order of their claim to room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum LineKind {
    Installation,
    Service,
    Pool,
    Reservation,
}

impl LineKind {
    fn of(line: &str) -> Self {
        match line.split(' ').next() {
            Some(RESERVED) => Self::Reservation,
            Some(POOL) => Self::Pool,
            Some(SEED | NODE_PORTS) => Self::Installation,
            _ => Self::Service,
        }
    }
}

/// One text, filled with Services, short ones first, then pools, then reservations, new ones first. What finds no room is
/// left out.
fn joined(mut lines: Vec<String>) -> String {
    let mut length: usize = VERSION.len() + 1 + lines.iter().map(|line| line.len() + 1).sum::<usize>();
    if length > TEXT_MAX {
        // The end of a reservation is its last word.
        let until_s = |line: &str| line.rsplit(' ').next().and_then(|word| word.parse::<u64>().ok());
        lines.sort_by_cached_key(|line| match LineKind::of(line) {
            LineKind::Reservation => (LineKind::Reservation, Reverse(until_s(line)), line.len()),
            kind => (kind, Reverse(None), line.len()),
        });
        let mut left_out = [0_usize; 3];
        length = VERSION.len() + 1;
        lines.retain(|line| {
            let with_line = length + line.len() + 1;
            if with_line <= TEXT_MAX {
                length = with_line;
                return true;
            }
            match LineKind::of(line) {
                LineKind::Installation | LineKind::Service => left_out[0] += 1,
                LineKind::Pool => left_out[1] += 1,
                LineKind::Reservation => left_out[2] += 1,
            }
            false
        });
        lines.sort();
        let [services, pools, reservations] = left_out;
        tracing::warn!(
            services,
            pools,
            reservations,
            "the checkpoint is too long and leaves these out; a new leader decides about such Services again, does not know the \
             routes of such pools once they are deleted, and gives freed addresses to others earlier"
        );
    }
    lines.insert(0, VERSION.to_owned());
    lines.iter().flat_map(|line| [line.as_str(), "\n"]).collect()
}

fn line(name: &ServiceName, decided: &Decided) -> String {
    let mut line = name.to_string();
    for address in &decided.addresses {
        let _ = write!(line, " {address}");
    }
    for ((protocol, port, family), size) in &decided.tables {
        let _ = write!(line, " {protocol}/{port}/{family}={size}");
    }
    match &decided.in_force {
        None => line.extend([" ", NEVER_SERVED]),
        Some(in_force) => {
            for (setting, word) in in_force.unusual_words() {
                let _ = write!(line, " {setting}={word}");
            }
        }
    }
    line
}

/// `has_words`: whether the checkpoint has the words of each Service that was served.
fn parse_service(line: &str, has_words: bool) -> Option<(ServiceName, Decided)> {
    let mut words = line.split(' ');
    let name = proto::convert::service_name(words.next()?).ok()?;
    let (mut decided, mut in_force, mut was_served) = (Decided::default(), BTreeMap::new(), has_words);
    for word in words {
        match word.split_once('=') {
            _ if word == NEVER_SERVED => was_served = false,
            None => decided.addresses.push(word.parse().ok()?),
            Some((setting, word)) if !setting.contains('/') => drop(in_force.insert(setting, word)),
            Some((table, size)) => {
                let size = size.parse().ok().filter(|size| MAGLEV_SIZES.contains(size))?;
                decided.tables.insert(parse_table(table)?, size);
            }
        }
    }
    was_served |= !in_force.is_empty();
    decided.in_force = Policy::parse(&in_force).filter(|_| was_served);
    Some((name, decided))
}

fn parse_table(text: &str) -> Option<TableKey> {
    let (protocol, rest) = text.split_once('/')?;
    let (port, family) = rest.split_once('/')?;
    let family = [Family::V4, Family::V6].into_iter().find(|known| known.to_string() == family)?;
    Some((protocol.parse().ok()?, port.parse().ok()?, family))
}

fn seed_line(seed: u64) -> String {
    format!("{SEED} {seed}")
}

/// The announcement method, the ranges, and for BGP both aggregation lengths, MED, local preference and communities.
fn pool_line(pool: &Pool) -> String {
    let (of_default, bgp) = (PoolBgp::default(), &pool.bgp);
    let ranges: Vec<String> = pool.ranges.iter().map(ToString::to_string).collect();
    let mut line = format!("{POOL} {} {}", announce_word(pool.announce), ranges.join(","));
    if *bgp != of_default {
        let _ = write!(
            line,
            " {} {} {} {}",
            bgp.aggregation_length,
            bgp.aggregation_length_v6,
            number(bgp.med),
            number(bgp.local_pref)
        );
        for community in &bgp.communities {
            let _ = write!(line, " {community}");
        }
    }
    line
}

const fn announce_word(announce: Announce) -> &'static str {
    match announce {
        Announce::L2 => "l2",
        Announce::Routed => "routed",
    }
}

/// A number that may be unset, as a word.
fn number(value: Option<u32>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

fn parse_pool(line: &str) -> Option<Pool> {
    let mut words = line.strip_prefix(POOL)?.strip_prefix(' ')?.split(' ');
    let first = words.next();
    let announce = [Announce::L2, Announce::Routed].into_iter().find(|known| Some(announce_word(*known)) == first)?;
    let ranges = words.next()?.split(',').map(|range| range.parse().ok()).collect::<Option<Vec<AddressRange>>>()?;
    let number = |word: &str| if word == "-" { Some(None) } else { word.parse().ok().map(Some) };
    let mut bgp = PoolBgp::default();
    if let Some(length) = words.next() {
        bgp.aggregation_length = length.parse().ok()?;
        bgp.aggregation_length_v6 = words.next()?.parse().ok()?;
        (bgp.med, bgp.local_pref) = (number(words.next()?)?, number(words.next()?)?);
        bgp.communities = words.map(|word| word.parse().ok()).collect::<Option<Vec<_>>>()?;
    }
    bgp.check(&ranges).ok()?;
    Some(Pool { name: String::new(), ranges, announce, bgp })
}

/// A name with a blank cannot be told from two: such a gateway says it again when it connects.
fn node_ports_line(gateways: &BTreeSet<String>) -> String {
    gateways.iter().fold(NODE_PORTS.to_owned(), |line, name| format!("{line} {name}"))
}

fn parse_node_ports(line: &str) -> Option<BTreeSet<String>> {
    let mut words = line.split(' ');
    (words.next()? == NODE_PORTS).then(|| words.map(ToOwned::to_owned).collect())
}

fn parse_seed(line: &str) -> Option<u64> {
    line.strip_prefix(SEED)?.strip_prefix(' ')?.parse().ok()
}

fn parse_reserved(line: &str) -> Option<(IpAddr, ServiceName, u64)> {
    let mut words = line.strip_prefix(RESERVED)?.strip_prefix(' ')?.split(' ');
    let (address, service, until_s) = (words.next()?, words.next()?, words.next()?);
    Some((address.parse().ok()?, proto::convert::service_name(service).ok()?, until_s.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checkpoint(now: Instant) -> Checkpoint {
        let mut all = Checkpoint::default();
        let tables = [((Protocol::Tcp, 80, Family::V4), 509), ((Protocol::Udp, 53, Family::V6), 1021)].into();
        let addresses = vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()];
        let in_force = Policy {
            mode: Mode::Gue,
            target: Target::Endpoint,
            scheduler: Scheduler::Maglev,
            ip_mode: IpMode::Vip,
            affinity_scope: AffinityScope::Service,
            probe: Probe::Https,
        };
        all.put(&ServiceName::new("shop", "web"), Decided { addresses, tables, in_force: Some(in_force) });
        all.put(
            &ServiceName::new("shop", "reserved"),
            Decided { addresses: vec!["192.0.2.2".parse().unwrap()], ..Decided::default() },
        );
        let until = now + Duration::from_secs(60);
        let service = ServiceName::new("shop", "old");
        let reserved = Arc::new(vec![Reserved { address: "192.0.2.3".parse().unwrap(), service, until }]);
        let node_port_gateways = Some(Arc::new(["edge-1".to_owned(), "edge-2".to_owned()].into()));
        Checkpoint { reserved, maglev_seed: Some(u64::MAX - 7), node_port_gateways, ..all }
    }

    #[test]
    fn a_checkpoint_is_restored_from_one_text_or_several() {
        let (now, clock) = (Instant::now(), UNIX_EPOCH + Duration::from_secs(1_000_000));
        let all = checkpoint(now);
        for count in [1, 4] {
            let texts = all.to_texts(count, now, clock);
            assert_eq!(texts.len(), count);
            // Parsed 20 s later.
            let later = Duration::from_secs(20);
            let read = Checkpoint::from_texts(&texts, now + later, clock + later);
            let expected = (all.services.clone(), &all.reserved, all.maglev_seed);
            assert_eq!((read.services, &read.reserved, read.maglev_seed), expected, "{texts:?}");
            assert_eq!(read.node_port_gateways, all.node_port_gateways);
        }
    }

    #[test]
    fn only_lines_that_cannot_be_parsed_are_skipped() {
        let (now, clock) = (Instant::now(), UNIX_EPOCH);
        let lines = ["v1", "shop/a 192.0.2.1", "shop/b 192.0.2.300", "shop/c tcp/80/IPv4=500", "reserved nonsense", "", "x"];
        let read = Checkpoint::from_texts(&[lines.join("\n"), "v2\nshop/d 192.0.2.4".to_owned(), String::new()], now, clock);
        assert_eq!(read.services.keys().map(ToString::to_string).collect::<Vec<_>>(), ["shop/a"]);
        assert!(read.reserved.is_empty());
    }

    #[test]
    fn a_text_that_is_too_long_loses_the_longest_services() {
        let mut all = Checkpoint::default();
        let tables = (1..=30_000).map(|port| ((Protocol::Tcp, port, Family::V4), 655_373)).collect::<BTreeMap<_, _>>();
        for name in ["large-1", "large-2"] {
            all.put(&ServiceName::new("shop", name), Decided { tables: tables.clone(), ..Decided::default() });
        }
        let one = |port| [((Protocol::Tcp, port, Family::V4), 251)].into();
        all.put(&ServiceName::new("shop", "small"), Decided { tables: one(80), ..Decided::default() });
        let texts = all.to_texts(1, Instant::now(), UNIX_EPOCH);
        assert!(texts[0].len() <= TEXT_MAX);
        let read = Checkpoint::from_texts(&texts, Instant::now(), UNIX_EPOCH);
        assert!(read.services.len() == 2 && read.services.contains_key(&ServiceName::new("shop", "small")));
    }

    #[test]
    fn services_and_pools_lose_no_room_to_reservations_and_new_reservations_none_to_old_ones() {
        let (mut all, now) = (Checkpoint::default(), Instant::now());
        let vip = || "2001:db8:1111:2222:3333:4444:5555:6666".parse().unwrap();
        for number in 0..100 {
            // A line of a Service is longer than one of a reservation.
            let name = ServiceName::new("shop", &format!("{number:0>100}"));
            all.put(&name, Decided { addresses: vec![vip()], ..Decided::default() });
        }
        let ranges = vec!["192.0.2.0/24".parse().unwrap()];
        all.pools = Arc::new(vec![Pool { name: String::new(), ranges, announce: Announce::L2, bgp: PoolBgp::default() }]);
        let reserved = |number: u64| Reserved {
            until: now + Duration::from_secs(number / 100),
            address: vip(),
            service: ServiceName::new("shop", &number.to_string()),
        };
        all.reserved = Arc::new((0..20_000).map(reserved).collect());
        let texts = all.to_texts(1, now, UNIX_EPOCH);
        assert!(texts[0].len() <= TEXT_MAX);
        let read = Checkpoint::from_texts(&texts, now, UNIX_EPOCH);
        assert_eq!((read.services.len(), read.pools.len()), (100, 1));
        assert!(read.reserved.len() < 20_000);
        assert!(read.reserved.iter().any(|one| one.service.name == "19999"));
        assert!(read.reserved.iter().all(|one| one.service.name != "0"));
    }
}
