//! Resets, removals and requests of the kernel, and members that leave a bond, over a real EAL with virtual devices.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod process;

use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use dpdk_sys::{BURST, Device, DeviceEvent, Eal, Mbuf, MemberChanges, Mempool, Port, StartedPort, release};
use process::{alone, pool, port_of, start};

type Burst = ArrayVec<Mbuf, BURST>;

fn open(eal: Eal, pool: Mempool, device: &str) -> StartedPort {
    Port::start(eal, &port_of(device.parse().unwrap()), pool).unwrap()
}

/// Waits for a condition, 10 s at most.
fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// What DPDK's drivers call when their device was reset or removed, and the device that they pass: symbols that DPDK
/// exports for drivers only.
mod driver {
    use std::ffi::{c_char, c_int, c_void};

    unsafe extern "C" {
        pub(super) fn rte_dev_event_callback_process(device: *const c_char, event: u32);
        pub(super) fn rte_eth_dev_allocated(name: *const c_char) -> *mut c_void;
        pub(super) fn rte_eth_dev_callback_process(device: *mut c_void, event: u32, result: *mut c_void) -> c_int;
        pub(super) fn rte_eth_dev_get_port_by_name(name: *const c_char, port: *mut u16) -> c_int;
        pub(super) fn rte_eth_macaddr_get(port: u16, mac: *mut [u8; 6]) -> c_int;
    }

    /// `RTE_DEV_EVENT_ADD` and `RTE_DEV_EVENT_REMOVE`.
    pub(super) const DEVICE_ADDED: u32 = 0;
    pub(super) const DEVICE_REMOVED: u32 = 1;
    /// `RTE_ETH_EVENT_INTR_RESET` and `RTE_ETH_EVENT_INTR_RMV`.
    pub(super) const RESET: u32 = 3;
    pub(super) const REMOVED: u32 = 6;
}

#[test]
#[allow(unsafe_code)]
fn a_port_tells_that_its_device_was_reset_or_removed_until_it_is_opened_anew() {
    alone("a_port_tells_that_its_device_was_reset_or_removed_until_it_is_opened_anew", || {
        let eal = start();
        let pool = pool(eal);
        let open = || open(eal, pool, "net_null0").port;
        // SAFETY: EAL runs; the port exists; the event takes no result.
        let report = |event| unsafe {
            let device = driver::rte_eth_dev_allocated(c"net_null0".as_ptr());
            assert!(!device.is_null());
            driver::rte_eth_dev_callback_process(device, event, std::ptr::null_mut())
        };
        let first = open();
        assert_eq!(first.event(), None);
        report(driver::RESET);
        assert_eq!(first.event(), Some(DeviceEvent::Reset));
        drop(first);
        let second = open();
        assert_eq!(second.event(), None, "a device that was opened anew");
        report(driver::REMOVED);
        assert_eq!(second.event(), Some(DeviceEvent::Removed));
    });
}

#[test]
#[allow(unsafe_code)]
fn a_device_that_the_kernel_asks_for_is_reported_until_it_is_closed() {
    alone("a_device_that_the_kernel_asks_for_is_reported_until_it_is_closed", || {
        let eal = start();
        let pool = pool(eal);
        // SAFETY: EAL runs; the name is terminated. The PCI bus makes this call when VFIO's interrupt comes.
        let ask = |name: &std::ffi::CStr, event| unsafe { driver::rte_dev_event_callback_process(name.as_ptr(), event) };
        let first = open(eal, pool, "net_null0").port;
        ask(c"net_null0", driver::DEVICE_ADDED);
        ask(c"net_null1", driver::DEVICE_REMOVED);
        assert_eq!(first.event(), None, "another device, and another event");
        ask(c"net_null0", driver::DEVICE_REMOVED);
        assert_eq!(first.event(), Some(DeviceEvent::Requested));
        drop(first);
        let second = open(eal, pool, "net_null0").port;
        assert_eq!(second.event(), None, "a device that was opened anew");
        drop(second);

        let bond: Device = "net_bonding0,mode=1,slave=net_null1,slave=net_null2".parse().unwrap();
        let port = Port::start(eal, &port_of(bond), pool).unwrap().port;
        assert!(port.member_changes().is_empty(), "members that were attached after the kernel asked for others of their name");
        ask(c"net_null2", driver::DEVICE_REMOVED);
        assert_eq!(port.member_changes().leaving, ["net_null2".parse().unwrap()]);
        assert_eq!(port.event(), None, "the bond stays");
    });
}

#[test]
fn a_member_leaves_a_started_bond_and_returns_to_it() {
    alone("a_member_leaves_a_started_bond_and_returns_to_it", || {
        let eal = start();
        let pool = pool(eal);
        let bond = "net_bonding0,mode=1,slave=net_null1,slave=net_null2";
        let StartedPort { mut port, mut rx, mut tx, .. } = Port::start(eal, &port_of(bond.parse().unwrap()), pool).unwrap();
        let [first, second]: [Device; 2] = port.device().members().try_into().unwrap();
        let mac = port.mac();
        until("the first member is active", || port.active_member() == Some(first.clone()));
        assert!(port.member_changes().is_empty());
        let leave = |member: &Device| MemberChanges { leaving: vec![member.clone()], ..MemberChanges::default() };

        assert_eq!(port.change_members(&leave(&first), &[], &[]).len(), 1, "a queue may be in use");
        assert_eq!(port.active_member(), Some(first.clone()));
        let mut change = |port: &mut Port, changes: &MemberChanges| {
            let (rx, tx): (Vec<_>, Vec<_>) = (rx.iter_mut().collect(), tx.iter_mut().collect());
            let failed = port.change_members(changes, &rx, &tx);
            assert!(failed.is_empty(), "{failed:?}");
        };
        change(&mut port, &leave(&first));
        until("the second member is active", || port.active_member() == Some(second.clone()));
        let changes = port.member_changes();
        assert_eq!(changes, MemberChanges { joining: vec![first.clone()], ..MemberChanges::default() });
        change(&mut port, &changes);
        assert!(port.member_changes().is_empty());
        change(&mut port, &leave(&second));
        until("the first member is active again", || port.active_member() == Some(first.clone()));
        assert_eq!(port.mac(), mac);
        let mut burst = Burst::new();
        rx.iter_mut().for_each(|queue| queue.receive(&mut burst));
        assert!(!burst.is_empty(), "the member that returned receives");
        release(&mut burst);
        drop((port, rx, tx));
        drop(Port::start(eal, &port_of(bond.parse().unwrap()), pool).unwrap());
    });
}

#[test]
#[allow(unsafe_code)]
fn members_of_an_802_3ad_bond_receive_what_is_for_the_bond() {
    alone("members_of_an_802_3ad_bond_receive_what_is_for_the_bond", || {
        let eal = start();
        let pool = pool(eal);
        const MAC: [u8; 6] = [2, 0, 0x5e, 0, 0x53, 1];
        // A ring has no address before it is given one: the one that is added becomes its own.
        let knows_mac = |name: &std::ffi::CStr| {
            let (mut id, mut mac) = (0, [0; 6]);
            // SAFETY: EAL runs; the name is terminated; a number and six bytes are written.
            unsafe {
                assert_eq!(driver::rte_eth_dev_get_port_by_name(name.as_ptr(), &raw mut id), 0);
                assert_eq!(driver::rte_eth_macaddr_get(id, &raw mut mac), 0);
            }
            mac == MAC
        };
        let mut config = port_of("net_bonding0,mode=4,slave=net_ring1,slave=net_ring2".parse().unwrap());
        config.mac = Some(MAC);
        let StartedPort { mut port, mut rx, mut tx, .. } = Port::start(eal, &config, pool).unwrap();
        assert!(knows_mac(c"net_ring1") && knows_mac(c"net_ring2"));
        let member: Device = "net_ring2".parse().unwrap();
        for changes in [
            MemberChanges { leaving: vec![member.clone()], ..MemberChanges::default() },
            MemberChanges { joining: vec![member.clone()], ..MemberChanges::default() },
        ] {
            let (rx, tx): (Vec<_>, Vec<_>) = (rx.iter_mut().collect(), tx.iter_mut().collect());
            let failed = port.change_members(&changes, &rx, &tx);
            assert!(failed.is_empty(), "{failed:?}");
        }
        assert!(knows_mac(c"net_ring2"), "a member that returned");
    });
}
