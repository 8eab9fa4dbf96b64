//! Tests of the safe layer over a real EAL with virtual devices. EAL starts once per process, so each test runs in its
//! own process: this program again, limited to that test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod process;

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use dpdk_sys::{
    BURST, Descriptors, Eal, EalConfig, Error, Hugepages, Mbuf, Mempool, MempoolConfig, Port, PortConfig, QueueModes, RingPort,
    RxQueue, Spread, StartedPort, release,
};
use process::{CHILD, alone, child, pool, pool_of, port_of, start};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::sched_getaffinity;

type Burst = ArrayVec<Mbuf, BURST>;

/// Like [`alone`], in a network namespace of its own.
fn alone_in_network(test: &str, body: impl FnOnce()) {
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        return body();
    }
    let mut command = Command::new("unshare");
    if !command.args(["--net", "true"]).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        return eprintln!("skipped: {test}, which needs CAP_SYS_ADMIN");
    }
    let mut command = Command::new("unshare");
    command.arg("--net").arg(std::env::current_exe().unwrap()).args(["--exact", "--nocapture", test]).env(CHILD, test);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    assert!(output.status.success(), "{test} failed in its process: {}\n{}", output.status, String::from_utf8_lossy(&text));
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

fn open(eal: Eal, pool: Mempool, device: &str) -> Result<(Port, dpdk_sys::RxQueue, dpdk_sys::TxQueue), Error> {
    let mut started = open_with(eal, pool, device, 1)?;
    Ok((started.port, started.rx.remove(0), started.tx.remove(0)))
}

fn open_with(eal: Eal, pool: Mempool, device: &str, queues: u16) -> Result<StartedPort, Error> {
    let spread = Some(Spread { key: [0x6d; 40], queues: std::array::from_fn(|entry| u16::try_from(entry % 2).unwrap()) });
    Port::start(eal, &PortConfig { queues, spread, ..port_of(device.parse()?) }, pool)
}

fn frame(pool: Mempool, tag: u8) -> Mbuf {
    let mut packet = pool.allocate().unwrap();
    assert!(packet.bytes().is_empty() && packet.is_contiguous());
    assert!(packet.resize(64));
    packet.bytes_mut().fill(tag);
    packet
}

#[test]
fn what_is_sent_into_a_ring_port_is_received_and_back() {
    alone("what_is_sent_into_a_ring_port_is_received_and_back", || {
        let eal = start();
        let pool = pool(eal);
        let _registered = eal.register_thread().unwrap();
        let mut ring = RingPort::new(eal, 0, 64, pool).unwrap();
        let mut burst: Burst = (0..20).map(|tag| frame(pool, tag)).collect();
        ring.input.put(&mut burst);
        assert!(burst.is_empty());
        ring.rx.receive(&mut burst);
        assert_eq!(burst.iter().map(|packet| packet.bytes()[63]).collect::<Vec<_>>(), (0..20).collect::<Vec<u8>>());
        ring.tx.transmit(&mut burst);
        assert!(burst.is_empty());
        assert_eq!(ring.port.stats().unwrap().rx_packets, 20);
        assert_eq!(ring.port.stats().unwrap().tx_packets, 20);
        ring.output.take(&mut burst);
        assert_eq!(burst.len(), 20);
        assert_eq!(burst[7].bytes(), [7; 64]);
        release(&mut burst);
        assert_eq!(pool.available(), pool.packets());
    });
}

/// A frame of these bytes, in segments of `segment_bytes` from `pool`.
fn chain(pool: Mempool, bytes: &[u8], segment_bytes: usize) -> Mbuf {
    let mut segments = bytes.chunks(segment_bytes).map(|part| {
        let mut segment = pool.allocate().unwrap();
        assert!(segment.resize(part.len()));
        segment.bytes_mut().copy_from_slice(part);
        segment
    });
    let mut packet = segments.next().unwrap();
    segments.for_each(|segment| packet.append(segment).unwrap());
    packet
}

#[test]
fn frames_in_segments_are_received_in_one() {
    alone("frames_in_segments_are_received_in_one", || {
        let eal = start();
        let small = pool(eal);
        let config = MempoolConfig { name: "jumbo".into(), packets: 63, frame_bytes: 9022, node: None };
        let large = Mempool::new(eal, &config).unwrap();
        let mut ring = RingPort::new(eal, 0, 64, large).unwrap();
        let bytes: Vec<u8> = (0..=250).cycle().take(9300).collect();
        // Buffer sizes are multiples of 1,024.
        let rows = [
            ("into the first buffer, which has room", large, 6000, 100, 6000),
            ("into a new buffer", small, 6000, 2000, 6000),
            ("as long as a buffer", small, 9216, 2048, 9216),
            ("headers and all in many", small, 600, 8, 600),
            ("a byte longer than a buffer: empty", small, 9217, 2048, 0),
        ];
        for (sentence, pool, len, segment_bytes, received) in rows {
            let mut burst: Burst =
                [frame(small, 1), chain(pool, &bytes[..len], segment_bytes), frame(small, 2)].into_iter().collect();
            assert!(!burst[1].is_contiguous());
            ring.input.put(&mut burst);
            ring.rx.receive(&mut burst);
            assert_eq!(burst.len(), 3, "{sentence}");
            assert!(burst.iter().all(Mbuf::is_contiguous), "{sentence}");
            assert_eq!(burst[1].bytes(), &bytes[..received], "{sentence}");
            assert_eq!((burst[0].bytes(), burst[2].bytes()), (&[1; 64][..], &[2; 64][..]), "{sentence}");
            assert!(received == 0 || burst[1].prepend(22), "{sentence}: there is room before it");
            drop(burst);
            assert_eq!(small.available() + large.available(), small.packets() + large.packets(), "{sentence}");
        }
        let all: Vec<Mbuf> = std::iter::from_fn(|| large.allocate()).collect();
        let mut burst: Burst = [chain(small, &bytes[..6000], 2000)].into_iter().collect();
        ring.input.put(&mut burst);
        ring.rx.receive(&mut burst);
        assert!(burst[0].bytes().is_empty() && burst[0].is_contiguous(), "no buffer is free");
        drop((all, burst));
        assert_eq!(small.available() + large.available(), small.packets() + large.packets());
    });
}

#[test]
fn a_device_that_cannot_take_the_mtu_is_refused_with_what_it_takes() {
    alone("a_device_that_cannot_take_the_mtu_is_refused_with_what_it_takes", || {
        let eal = start();
        let pool = pool(eal);
        let start = |device: &str, mtu_bytes| {
            let device = device.parse().unwrap();
            Port::start(eal, &PortConfig { mtu_bytes, ..port_of(device) }, pool)
        };
        assert_eq!(start("net_null0", 9000).unwrap().port.driver(), "net_null");
        match start("net_af_packet0,iface=lo", 9216) {
            Err(Error::Privilege { .. }) => eprintln!("skipped: af_packet, which needs CAP_NET_RAW"),
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("net_af_packet0,iface=lo: cannot set the MTU: its driver takes "), "{error}");
                assert!(error.contains("and 9216 are wanted"), "{error}");
            }
            Ok(port) => assert_eq!(port.port.mtu_bytes().unwrap(), 9216, "a driver that takes it sets it"),
        }
    });
}

#[test]
fn a_driver_that_makes_segments_of_long_frames_is_understood() {
    alone("a_driver_that_makes_segments_of_long_frames_is_understood", || {
        let eal = start();
        let small = pool(eal);
        let config = MempoolConfig { name: "jumbo".into(), packets: 1023, frame_bytes: 9026, node: None };
        let large = Mempool::new(eal, &config).unwrap();
        let bytes: Vec<u8> = (0..=250).cycle().take(9014).collect();
        // memif passes frames of any length through buffers of 2 KB, into as many buffers of the receiver as they need.
        for (id, to, received) in [(0, large, bytes.len()), (1, small, 0)] {
            let memif = |role: &str, pool: Mempool| {
                let socket = format!("socket=sluice-memif-{}-{id}", std::process::id());
                open(eal, pool, &format!("net_memif_{role}{id},role={role},bsize=2048,{socket}")).unwrap()
            };
            let (server, mut rx, _tx) = memif("server", to);
            let (client, _rx, mut tx) = memif("client", large);
            let deadline = Instant::now() + Duration::from_secs(20);
            while !(server.link().unwrap().is_up && client.link().unwrap().is_up) {
                assert!(Instant::now() < deadline, "not connected");
                std::thread::yield_now();
            }
            let mut packet = large.allocate().unwrap();
            assert!(packet.resize(bytes.len()));
            packet.bytes_mut().copy_from_slice(&bytes);
            let mut burst: Burst = [packet, frame(large, 7)].into_iter().collect();
            tx.transmit(&mut burst);
            assert!(burst.is_empty());
            while burst.len() < 2 {
                assert!(Instant::now() < deadline, "received {} of 2", burst.len());
                rx.receive(&mut burst);
            }
            assert!(burst.iter().all(Mbuf::is_contiguous));
            assert_eq!(burst[0].bytes(), &bytes[..received]);
            assert_eq!(burst[1].bytes(), [7; 64]);
        }
    });
}

#[test]
fn what_the_driver_refuses_stays_in_the_burst_in_order() {
    alone("what_the_driver_refuses_stays_in_the_burst_in_order", || {
        let eal = start();
        let pool = pool(eal);
        let mut ring = RingPort::new(eal, 3, 16, pool).unwrap();
        let mut burst: Burst = (0..32).map(|tag| frame(pool, tag)).collect();
        ring.tx.transmit(&mut burst);
        assert_eq!(burst.iter().map(|packet| packet.bytes()[0]).collect::<Vec<_>>(), (15..32).collect::<Vec<u8>>());
        release(&mut burst);
        ring.output.take(&mut burst);
        assert_eq!(burst.iter().map(|packet| packet.bytes()[0]).collect::<Vec<_>>(), (0..15).collect::<Vec<u8>>());
        drop(burst);
        assert_eq!(pool.available(), pool.packets());
    });
}

#[test]
fn a_port_that_is_dropped_leaves_no_packet_behind_and_can_be_opened_again() {
    alone("a_port_that_is_dropped_leaves_no_packet_behind_and_can_be_opened_again", || {
        let eal = start();
        let pool = pool(eal);
        for _ in 0..3 {
            let (port, mut rx, mut tx) = open(eal, pool, "net_null0,size=100").unwrap();
            assert_eq!(port.driver(), "net_null");
            assert_eq!(port.mtu_bytes().unwrap(), 1500);
            let mut burst = Burst::new();
            rx.receive(&mut burst);
            assert_eq!((burst.len(), burst[BURST - 1].bytes().len()), (BURST, 100));
            tx.transmit(&mut burst);
            assert!(burst.is_empty());
            assert_eq!(pool.available(), pool.packets());
            assert!(matches!(open(eal, pool, "net_null0"), Err(Error::DeviceInUse { .. })));
        }
    });
}

#[test]
fn a_packet_grows_and_shrinks_within_its_buffer() {
    alone("a_packet_grows_and_shrinks_within_its_buffer", || {
        let pool = pool(start());
        let mut packet = frame(pool, 9);
        assert!(packet.resize(2048));
        assert!(!packet.resize(2049) && !packet.resize(65536 + 64));
        assert_eq!(packet.bytes().len(), 2048);
        assert!(packet.resize(10));
        assert_eq!(packet.bytes(), [9; 10]);
    });
}

#[test]
fn an_empty_pool_gives_none_and_recovers_on_any_thread() {
    alone("an_empty_pool_gives_none_and_recovers_on_any_thread", || {
        let eal = start();
        let pool = pool(eal);
        let mut all: Vec<Mbuf> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(all.len(), 1023);
        let mut burst = Burst::new();
        assert!(!pool.fill(&mut burst) && burst.is_empty());
        let half = all.split_off(500);
        std::thread::scope(|scope| {
            scope.spawn(move || drop(half));
            scope.spawn(move || {
                let _registered = eal.register_thread().unwrap();
                drop(all);
            });
        });
        assert_eq!(pool.available(), pool.packets());
        assert!(pool.fill(&mut burst) && burst.is_full());
    });
}

#[test]
fn the_caller_keeps_its_cores_and_eal_starts_once() {
    alone("the_caller_keeps_its_cores_and_eal_starts_once", || {
        let before = sched_getaffinity(None).unwrap();
        let first = (0..1024).find(|&core| before.is_set(core)).unwrap();
        let config = EalConfig { hugepages: Hugepages::Off, memory_mb: 16, node: None, devices: vec![], cores: vec![first] };
        let eal = Eal::start(&config).unwrap();
        assert!(!eal.uses_hugepages());
        assert!(eal.cycles_per_second() > 1_000_000);
        assert_eq!(sched_getaffinity(None).unwrap(), before);
        assert_eq!(std::thread::spawn(|| sched_getaffinity(None).unwrap()).join().unwrap(), before);
        assert!(matches!(Eal::start(&config), Err(Error::AlreadyStarted)));
    });
}

#[test]
fn a_device_that_cannot_be_attached_is_named_with_the_reason() {
    alone("a_device_that_cannot_be_attached_is_named_with_the_reason", || {
        let eal = start();
        let pool = pool(eal);
        let text = |device: &str| open(eal, pool, device).unwrap_err().to_string();
        let error = text("net_af_packet0,iface=sluice-absent");
        assert!(error.contains("net_af_packet0") && error.contains("no interface \"sluice-absent\""), "{error}");
        let error = text("net_nothing0");
        assert!(error.contains("device net_nothing0: DPDK has no driver of that name"), "{error}");
        let error = text("0000:ff:1f.7");
        assert!(error.contains("it is not on the PCI bus"), "{error}");
        let error = text("net_null0,size=x,nonsense=1");
        assert!(error.contains("device net_null0,size=x,nonsense=1"), "{error}");
        assert_eq!(pool.available(), pool.packets());
    });
}

#[test]
fn a_pool_larger_than_the_memory_is_refused_with_its_size() {
    alone("a_pool_larger_than_the_memory_is_refused_with_its_size", || {
        let config = MempoolConfig { name: "large".into(), packets: 1 << 20, frame_bytes: 1518, node: None };
        let error = Mempool::new(start(), &config).unwrap_err().to_string();
        assert!(error.contains("\"large\" of 1048576 packets x 1518 bytes"), "{error}");
    });
}

#[test]
fn a_pool_takes_no_more_memory_than_foretold() {
    alone("a_pool_takes_no_more_memory_than_foretold", || {
        let pool = MempoolConfig { name: "large".into(), packets: 16383, frame_bytes: 1518, node: None };
        let memory_mb = pool.memory_bytes(&[]).div_ceil(1 << 20) + 4;
        let eal =
            Eal::start(&EalConfig { hugepages: Hugepages::Off, memory_mb, node: None, devices: vec![], cores: vec![] }).unwrap();
        assert_eq!(Mempool::new(eal, &pool).unwrap().available(), 16383);
    });
}

#[test]
fn a_pool_for_af_xdp_has_no_packet_across_pages() {
    alone("a_pool_for_af_xdp_has_no_packet_across_pages", || {
        let devices = vec!["net_af_xdp0,iface=absent".parse().unwrap()];
        let pool = MempoolConfig { name: "paged".into(), packets: 4095, frame_bytes: 1518, node: None };
        let memory_mb = pool.memory_bytes(&devices).div_ceil(1 << 20) + 4;
        let eal = Eal::start(&EalConfig { hugepages: Hugepages::Off, memory_mb, node: None, devices, cores: vec![] }).unwrap();
        let pool = Mempool::new(eal, &pool).unwrap();
        let packets: Vec<Mbuf> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(packets.len(), 4095);
        let page = |address: usize| address / 4096;
        assert!(packets.iter().map(|packet| packet.bytes().as_ptr() as usize).all(|start| page(start) == page(start + 2047)));
    });
}

#[test]
fn a_killed_process_leaves_no_runtime_directory() {
    let test = "a_killed_process_leaves_no_runtime_directory";
    let directories = || -> Vec<PathBuf> {
        let parents = ["/var/run/dpdk".into(), "/tmp/dpdk".into(), std::env::temp_dir().join("dpdk")];
        parents
            .iter()
            .flat_map(|parent: &PathBuf| std::fs::read_dir(parent))
            .flatten()
            .map(|entry| entry.unwrap().path())
            .collect()
    };
    if std::env::var(CHILD).is_ok_and(|name| name == test) {
        start();
        println!("started");
        let _ = std::io::stdin().read_line(&mut String::new());
        return;
    }
    let mut killed = child(test).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(killed.stdout.take().unwrap()));
    assert!(lines.any(|line| line.unwrap().contains("started")), "EAL did not start");
    let own = format!("sluice-{}", killed.id());
    killed.kill().unwrap();
    killed.wait().unwrap();
    assert!(!directories().iter().any(|path| path.ends_with(&own)), "{own} is left");
}

#[test]
fn a_port_has_as_many_queues_as_the_device_allows_and_says_why_it_does_not_spread() {
    alone("a_port_has_as_many_queues_as_the_device_allows_and_says_why_it_does_not_spread", || {
        let eal = start();
        let pool = pool(eal);
        let two = open_with(eal, pool, "net_null0", 2).unwrap();
        assert_eq!((two.rx.len(), two.tx.len()), (2, 2));
        let why = two.spread.unwrap_err().to_string();
        assert!(why.contains("net_null"), "net_null offers a table, and no key to spread by: {why}");
        let mut queues = two.rx;
        for queue in &mut queues {
            let mut burst = Burst::new();
            queue.receive(&mut burst);
            assert!(!burst.is_empty(), "net_null always has packets");
            assert!(burst.iter().all(|packet| packet.rss_hash().is_none()));
            release(&mut burst);
        }
        let one = open_with(eal, pool, "net_null1", 1).unwrap();
        assert_eq!((one.rx.len(), one.tx.len()), (1, 1));
    });
}

#[test]
fn offloads_that_a_driver_does_not_offer_are_not_used_and_modes_that_it_does_not_tell_are_unknown() {
    alone("offloads_that_a_driver_does_not_offer_are_not_used_and_modes_that_it_does_not_tell_are_unknown", || {
        let eal = start();
        let config = PortConfig { fast_free: true, ..port_of("net_null0".parse().unwrap()) };
        let started = Port::start(eal, &config, pool(eal)).unwrap();
        assert_eq!(started.port.modes(), &QueueModes::default());
        assert_eq!(started.port.queue_counts(), (1, 1));
    });
}

/// Whether the queue becomes readable within this time.
fn is_readable(rx: &RxQueue, timeout: Duration) -> bool {
    let timeout = Timespec { tv_sec: timeout.as_secs().cast_signed(), tv_nsec: timeout.subsec_nanos().into() };
    let readable = rx.readable().unwrap();
    let mut fds = [PollFd::new(readable, PollFlags::IN)];
    poll(&mut fds, Some(&timeout)).unwrap() > 0
}

/// Receives all packets that wait, and counts the frames of 64 bytes with this tag.
fn count(rx: &mut RxQueue, tag: u8) -> usize {
    let mut found = 0;
    loop {
        let mut burst = Burst::new();
        rx.receive(&mut burst);
        if burst.is_empty() {
            return found;
        }
        found += burst.iter().filter(|packet| packet.bytes() == [tag; 64]).count();
        release(&mut burst);
    }
}

#[test]
fn packets_wake_a_thread_that_waits_for_a_queue_it_has_armed() {
    alone_in_network("packets_wake_a_thread_that_waits_for_a_queue_it_has_armed", || {
        ip("link add far type veth peer name near");
        ip("link set far up");
        ip("link set near up");
        let eal = start();
        // The queue of the tap holds 1,024.
        let pool = Mempool::new(eal, &pool_of(4095)).unwrap();
        let open_waking = |device: &str, wakes| {
            let config = PortConfig { wakes, ..port_of(device.parse().unwrap()) };
            let StartedPort { port, mut rx, mut tx, .. } = Port::start(eal, &config, pool).unwrap();
            (port, rx.remove(0), tx.remove(0))
        };
        let (_far, no_wakeup, mut far_tx) = open_waking("net_af_packet0,iface=far", false);
        let (_tap, mut tap_rx, _tap_tx) = open_waking("net_tap0,iface=dtap0", true);
        let (_to_tap, _, mut to_tap) = open_waking("net_af_packet1,iface=dtap0", true);
        let (_near, mut near_rx, _near_tx) = open_waking("net_af_packet2,iface=near", true);
        let (_null, null_rx, _null_tx) = open_waking("net_null0", true);
        assert!(no_wakeup.readable().is_none() && null_rx.readable().is_none());

        for (tx, rx, tag) in [(&mut far_tx, &mut near_rx, 0xa1), (&mut to_tap, &mut tap_rx, 0xa2)] {
            for _ in 0..3 {
                let deadline = Instant::now() + Duration::from_secs(120);
                // Linux sends frames of its own when an interface appears.
                while {
                    rx.arm(true);
                    count(rx, tag);
                    is_readable(rx, Duration::from_millis(200))
                } {
                    rx.arm(false);
                    assert!(Instant::now() < deadline, "it stays readable");
                }
                let mut burst = Burst::from_iter([frame(pool, tag)]);
                tx.transmit(&mut burst);
                assert!(burst.is_empty());
                let mut found = 0;
                while found == 0 {
                    assert!(is_readable(rx, Duration::from_secs(120)), "the packet wakes nobody");
                    rx.arm(false);
                    found = count(rx, tag);
                    rx.arm(true);
                }
                assert_eq!(found, 1);
                rx.arm(false);
            }
        }
    });
}

#[test]
fn frames_that_af_packet_loses_are_counted_as_missed() {
    alone_in_network("frames_that_af_packet_loses_are_counted_as_missed", || {
        ip("link add far type veth peer name near");
        ip("link set far up");
        ip("link set near up");
        let eal = start();
        let pool = Mempool::new(eal, &pool_of(4095)).unwrap();
        let open = |device: &str| {
            let config = port_of(device.parse().unwrap());
            let StartedPort { port, mut rx, mut tx, .. } = Port::start(eal, &config, pool).unwrap();
            (port, rx.remove(0), tx.remove(0))
        };
        let (_far, _far_rx, mut tx) = open("net_af_packet0,iface=far");
        // The ring holds 64 frames, and nobody takes them until all are sent.
        let (near, mut rx, _near_tx) = open("net_af_packet1,iface=near,framecnt=64");
        let (sent, tag) = (300, 0xa3);
        for _ in 0..sent {
            let mut burst = Burst::from_iter([frame(pool, tag)]);
            tx.transmit(&mut burst);
            assert!(burst.is_empty());
        }
        let (mut found, deadline) = (0, Instant::now() + Duration::from_secs(120));
        // The kernel delivers in the background. Frames of its own are missed, too.
        while found + near.stats().unwrap().rx_missed < sent {
            assert!(Instant::now() < deadline, "{found} of {sent} received, {:?}", near.stats());
            if near.stats().unwrap().rx_missed >= sent - 64 {
                found += count(&mut rx, tag) as u64;
            }
        }
        let missed = near.stats().unwrap().rx_missed;
        assert!(found <= 64 && missed >= sent - 64, "{found} received, {missed} missed");
        assert_eq!(near.stats().unwrap().rx_missed, missed, "reading changes nothing");
    });
}

#[test]
fn queues_have_the_descriptors_that_are_asked_for() {
    alone("queues_have_the_descriptors_that_are_asked_for", || {
        let eal = start();
        let pool = pool(eal);
        let descriptors = Descriptors { rx: 512, tx: 256 };
        let device = "net_null0".parse().unwrap();
        let config = PortConfig { descriptors, ..port_of(device) };
        assert_eq!(Port::start(eal, &config, pool).unwrap().port.descriptors(), descriptors);
    });
}

/// DPDK's timer library as a driver uses it.
mod timer {
    use std::ffi::{c_int, c_uint, c_void};
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Room for a `struct rte_timer`, which has less than 256 bytes.
    #[repr(align(64))]
    pub(super) struct Room(pub(super) [u8; 512]);

    pub(super) static RUNS: AtomicUsize = AtomicUsize::new(0);

    pub(super) extern "C" fn count(_timer: *mut c_void, _argument: *mut c_void) {
        RUNS.fetch_add(1, Ordering::SeqCst);
    }

    /// `LCORE_ID_ANY`: a lcore of DPDK's choice.
    pub(super) const ANY: c_uint = c_uint::MAX;

    #[link(name = "rte_timer")]
    unsafe extern "C" {
        pub(super) fn rte_timer_subsystem_init() -> c_int;
        pub(super) fn rte_timer_init(timer: *mut c_void);
        pub(super) fn rte_timer_reset(
            timer: *mut c_void,
            ticks: u64,
            kind: c_int,
            lcore: c_uint,
            function: extern "C" fn(*mut c_void, *mut c_void),
            argument: *mut c_void,
        ) -> c_int;
    }
}

#[test]
#[allow(unsafe_code)]
fn timers_of_drivers_run_on_a_registered_thread_whatever_lcore_they_are_on() {
    use std::sync::atomic::Ordering;
    alone("timers_of_drivers_run_on_a_registered_thread_whatever_lcore_they_are_on", || {
        let eal = start();
        let (_port, mut rx, _tx) = open(eal, pool(eal), "net_null0").unwrap();
        let room: &'static mut timer::Room = Box::leak(Box::new(timer::Room([0; 512])));
        let raw = room.0.as_mut_ptr().cast();
        // SAFETY: EAL runs; the timer has room and lives as long as the process; its function takes no argument.
        unsafe {
            assert_eq!(timer::rte_timer_subsystem_init(), 0);
            timer::rte_timer_init(raw);
            assert_eq!(timer::rte_timer_reset(raw, 0, 0, timer::ANY, timer::count, std::ptr::null_mut()), 0);
        }
        let runs = move || {
            rx.run_timers();
            timer::RUNS.load(Ordering::SeqCst)
        };
        let thread = std::thread::spawn(move || {
            let mut runs = runs;
            let before = runs();
            let _registered = eal.register_thread().unwrap();
            (before, runs(), runs())
        });
        assert_eq!(thread.join().unwrap(), (0, 1, 1), "not before the thread is registered, and once");
    });
}
