//! The engine's port over DPDK. EAL starts once per process, so this file has one test.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::mpsc::channel;

use core_affinity::CoreId;
use dataplane::{Buffer, Burst, Port};
use dpdk_port::{DpdkPort, Packet, QueuePair, QueueReceiver, size_memory};
use dpdk_sys::{Eal, EalConfig, Hugepages, Mempool, RingPort};
use sluice::worker_threads::{Bell, Rest, Turn, spawn};

/// Receives a burst, appends a byte to each frame, and sends all frames.
fn append_byte(port: &mut DpdkPort) -> usize {
    let mut burst = Burst::new();
    port.receive(&mut burst);
    for packet in &mut burst {
        let len = packet.bytes().len();
        assert!(packet.resize(len + 1));
        packet.bytes_mut()[len] = 0xee;
    }
    let received = burst.len();
    port.transmit(&mut burst);
    assert!(burst.is_empty(), "the output ring has room for all");
    received
}

#[test]
fn a_pinned_worker_moves_packets_through_a_dpdk_port_and_none_is_lost() {
    let (pool_config, memory_mb) = size_memory(1, 1, 1500);
    let config = EalConfig { hugepages: Hugepages::Off, memory_mb, node: None, devices: vec![], cores: vec![] };
    let eal = Eal::start(&config).unwrap();
    let pool = Mempool::new(eal, &pool_config).unwrap();
    let RingPort { port, rx, tx, mut input, mut output } = RingPort::new(eal, 0, 256, pool).unwrap();

    let mut engine_side = DpdkPort::new(QueueReceiver::fixed(QueuePair { rx: Some(rx), tx: Some(tx) }), pool);
    let mut burst: Burst<Packet> = (0..32).map(|_| engine_side.allocate().unwrap()).collect();
    for (packet, tag) in burst.iter_mut().zip(0..) {
        assert!(packet.bytes().is_empty() && packet.resize(60));
        packet.bytes_mut().fill(tag);
    }
    input.put(&mut burst);
    assert!(burst.is_empty());

    let (sender, receiver) = channel();
    let core: CoreId = core_affinity::get_core_ids().unwrap()[0];
    let rest = Rest { bell: Bell::new().unwrap(), max_flows: 1 };
    let worker = spawn(0, core, Some(rest), Some(eal), move |turn| {
        match turn {
            Turn::Poll { .. } => {}
            Turn::Sleep(sleep) => {
                sleep.wake_for(&mut engine_side);
                return 0;
            }
            Turn::Arm | Turn::Wake | Turn::End => return 0,
        }
        let handled = append_byte(&mut engine_side);
        if handled > 0 {
            let _ = sender.send(handled);
        }
        handled
    });
    let worker = worker.unwrap();
    let mut handled = 0;
    while handled < 32 {
        handled += receiver.recv_timeout(std::time::Duration::from_secs(120)).unwrap();
    }
    worker.stop();

    output.take(&mut burst);
    assert_eq!(burst.len(), 32);
    assert_eq!(burst[31].bytes()[59..], [31, 0xee]);
    assert_eq!(port.stats().unwrap().rx_packets, 32);
    dpdk_sys::release(&mut burst);
    assert_eq!(pool.available(), pool.packets());
}
