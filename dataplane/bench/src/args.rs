//! The flags of `sluiced bench`. A command line that cannot be read exits with 2, which is clap's own code.

use clap::{Args, ValueEnum};
use proto::Mode;

/// Format of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// JSON for programs.
    Json,
}

/// Forwarding mode of `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchMode {
    /// Destination and source address are rewritten.
    Nat,
    /// The destination address is rewritten.
    Dnat,
    /// Only the Ethernet addresses are rewritten; the backend is on the link.
    Dsr,
    /// The packet is encapsulated in an IP packet.
    Ipip,
    /// The packet is encapsulated in a UDP datagram.
    Gue,
    /// Only the Ethernet addresses are swapped; this measures the harness alone.
    None,
}

impl BenchMode {
    /// The mode of the services; `None` for the harness alone, which has no services.
    #[must_use]
    pub const fn of_services(self) -> Option<Mode> {
        match self {
            Self::Nat => Some(Mode::Nat),
            Self::Dnat => Some(Mode::Dnat),
            Self::Dsr => Some(Mode::Dsr),
            Self::Ipip => Some(Mode::Ipip),
            Self::Gue => Some(Mode::Gue),
            Self::None => None,
        }
    }
}

/// Address family of `bench`'s packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchFamily {
    /// IPv4.
    V4,
    /// IPv6.
    V6,
}

/// I/O of `bench`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchIo {
    /// Buffers in memory.
    Mem,
    /// DPDK rings, fed by a second core.
    Ring,
}

/// Transport protocol of `bench`'s packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchProtocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

/// State of `bench`'s flows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchState {
    /// Both sides have shown that they exist: a whole handshake; of UDP a packet, its reply and a packet. In one-way
    /// modes the client has continued for two seconds.
    Established,
    /// Only the client has sent.
    Opening,
}

/// Direction of `bench`'s packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BenchDirection {
    /// From clients.
    ToBackend,
    /// From backends.
    ToClient,
    /// Bursts of both in turn.
    Both,
}

/// Sizes of `bench`'s frames, in bytes with frame check sequence, without VLAN tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FrameSize {
    /// All frames have this size, or are the shortest that carry their headers.
    Each(u16),
    /// 64, 594 and 1,518 bytes as 7:4:1.
    Imix,
}

/// Flags of `bench`.
#[derive(Clone, Debug, Args)]
pub struct BenchArgs {
    /// Packets of all modes, both families and both directions in each burst, of clients and backends with and without
    /// VLAN tag, behind next hops of equal cost; one in 100 a SYN, one a FIN, one a fragment.
    #[arg(long, conflicts_with_all = [
        "mode", "family", "protocol", "state", "direction", "services", "size", "no_df", "vlan", "ecmp", "workers", "handover",
        "new_flows", "snat_load", "flood", "latency", "listing",
    ])]
    pub mix: bool,
    /// Forwarding mode.
    #[arg(long, value_enum, default_value = "nat")]
    pub mode: BenchMode,
    /// Address family.
    #[arg(long, value_enum, default_value = "v4")]
    pub family: BenchFamily,
    /// Transport protocol.
    #[arg(long, value_enum, default_value = "tcp")]
    pub protocol: BenchProtocol,
    /// State of the flows.
    #[arg(long, value_enum, default_value = "established")]
    pub state: BenchState,
    /// Direction of the packets: `both` by default where replies pass the gateway and flows are established.
    #[arg(long, value_enum)]
    pub direction: Option<BenchDirection>,
    /// Number of flows; packets of all flows arrive in random order.
    #[arg(long, value_name = "N", default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(1..=1 << 30))]
    pub flows: u32,
    /// Services.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub services: u32,
    /// Backends of each service.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=6_553))]
    pub backends: u32,
    /// Size of the frames in bytes, with frame check sequence, without VLAN tag; `imix`: 64, 594 and 1518 as 7:4:1.
    #[arg(long, value_name = "N|imix", default_value = "64", value_parser = frame_size)]
    pub size: FrameSize,
    /// IPv4 packets may be fragmented: the flag DF is not set.
    #[arg(long)]
    pub no_df: bool,
    /// Frames carry a VLAN tag on both sides.
    #[arg(long)]
    pub vlan: bool,
    /// Clients, and backends unless they are on the link, are behind N next hops of equal cost.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16))]
    pub ecmp: u8,
    /// Number of workers, each on its own core from `--core` on, with its own flows and ports; `--io mem` only.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub workers: u8,
    /// Every packet arrives at another worker than the one that owns it; measured beside the same without.
    #[arg(long, conflicts_with_all = ["new_flows", "flood"])]
    pub handover: bool,
    /// Every packet opens a flow; the simulated time lets as many flows expire.
    #[arg(long, conflicts_with = "flood")]
    pub new_flows: bool,
    /// With `--new-flows`: live flows hold this percentage of the SNAT ports.
    #[arg(long, value_name = "PERCENT", requires = "new_flows", value_parser = clap::value_parser!(u8).range(1..=98))]
    pub snat_load: Option<u8>,
    /// Every packet is a SYN of a new flow without further packets, and time stands still.
    #[arg(long)]
    pub flood: bool,
    /// Also measure latency, from a packet's arrival until it leaves, at 10, 50 and 90 % load.
    #[arg(long)]
    pub latency: bool,
    /// Also measure while another core lists all flows, as `sluicectl flows` does; alternately with and without.
    #[arg(long)]
    pub listing: bool,
    /// I/O of the packets.
    #[arg(long, value_enum, default_value = "mem")]
    pub io: BenchIo,
    /// Packet buffers of each worker with `--io mem`, used in turn.
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(256..=1 << 20))]
    pub buffers: u32,
    /// Seconds to measure, after a warm-up.
    #[arg(long, value_name = "S", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=3_600))]
    pub seconds: u32,
    /// Core of the first worker.
    #[arg(long, value_name = "C", default_value_t = 1)]
    pub core: usize,
    /// Core that feeds `--io ring`, or lists flows; by default the one before `--core`, or the one after core 0.
    #[arg(long, value_name = "C")]
    pub generator_core: Option<usize>,
    /// Output format; a table by default.
    #[arg(short, value_name = "FORMAT")]
    pub output: Option<ReportFormat>,
}

fn frame_size(text: &str) -> Result<FrameSize, String> {
    match text.parse() {
        Ok(bytes @ 64..=1518) => Ok(FrameSize::Each(bytes)),
        Err(_) if text == "imix" => Ok(FrameSize::Imix),
        _ => Err("expected 64 to 1518, or imix".to_owned()),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Bench {
        #[command(flatten)]
        args: BenchArgs,
    }

    impl BenchArgs {
        /// Those of a command line.
        pub(crate) fn parsed(args: &[&str]) -> Self {
            Bench::try_parse_from([&["bench"], args].concat()).unwrap().args
        }
    }

    #[test]
    fn the_flags_are_consistent() {
        use clap::CommandFactory as _;
        Bench::command().debug_assert();
    }

    #[test]
    fn a_mix_has_no_mode_family_or_kind_of_packets_of_its_own() {
        let mixed = |args: &str| Bench::try_parse_from(["bench", "--mix"].into_iter().chain(args.split(' ')));
        assert!(mixed("--flows 1000 --backends 4 --io ring --buffers 512 --core 0").unwrap().args.mix);
        for wrong in [
            "--mode nat",
            "--family v6",
            "--protocol tcp",
            "--state established",
            "--direction both",
            "--services 2",
            "--size imix",
            "--no-df",
            "--vlan",
            "--ecmp 4",
            "--workers 2",
            "--handover",
            "--new-flows",
            "--flood",
            "--latency",
            "--listing",
        ] {
            let error = mixed(wrong).unwrap_err();
            let flag = wrong.split(' ').next().unwrap();
            assert_eq!(error.exit_code(), 2, "{wrong}");
            assert!(error.to_string().contains("--mix") && error.to_string().contains(flag), "{wrong}: {error}");
        }
    }

    #[test]
    fn bench_reads_modes_and_refuses_what_there_is_not() {
        for mode in Mode::ALL {
            let args = Bench::try_parse_from(["bench", "--mode", mode.as_str()]).unwrap().args;
            assert_eq!(args.mode.of_services(), Some(*mode));
        }
        let args =
            Bench::try_parse_from(["bench", "--mode", "none", "--io", "ring", "--family", "v6", "-o", "json"]).unwrap().args;
        assert_eq!((args.mode, args.io, args.family), (BenchMode::None, BenchIo::Ring, BenchFamily::V6));
        let sizes = ["64", "1518", "imix"].map(|size| Bench::try_parse_from(["bench", "--size", size]).unwrap().args.size);
        assert_eq!(sizes, [FrameSize::Each(64), FrameSize::Each(1518), FrameSize::Imix]);
        for wrong in [
            ["--mode", "snat"],
            ["--workers", "65"],
            ["--flows", "0"],
            ["-o", "yaml"],
            ["--size", "63"],
            ["--size", "mixed"],
            ["--ecmp", "0"],
            ["--buffers", "255"],
            ["--snat-load", "95"],
            ["--protocol", "sctp"],
        ] {
            let error = Bench::try_parse_from(["bench", wrong[0], wrong[1]]).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong:?}");
        }
    }
}
