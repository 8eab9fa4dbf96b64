//! One sentence each: what arrives, and what leaves.

use std::net::SocketAddr;

use dataplane::flow::{FlowView, Tick};
use dataplane::forward::{About, EndedFlow, FamilyInquiry, FlowEnds, Inquired};
use dataplane::tcp_flags::{ACK, FIN, PSH, RST, SYN};
use dataplane::testing::{Packet, assert_checksums, with_segment_size};
use dataplane::{Config, DropReason, PacketOutcome, PortConfig};
use proto::{Family, Mode, ProxyProtocol};

use super::bridge::{Bridge, Kind, MILLISECOND, SERVER, Seg, Sent, header, set_proxy_protocol};
use crate::rig::{CLUSTER, Rig, UPLINK};

const URG: u8 = 0x20;

/// Timestamps as most stacks send them.
fn stamps(value: u32, echo: u32) -> Vec<u8> {
    [&[1, 1, 8, 10][..], &value.to_be_bytes(), &echo.to_be_bytes()].concat()
}

/// A SACK option of these blocks behind two bytes of padding.
fn sack(blocks: &[[u32; 2]]) -> Vec<u8> {
    let mut option = vec![1, 1, 5, u8::try_from(2 + 8 * blocks.len()).unwrap()];
    blocks.iter().flatten().for_each(|edge| option.extend(edge.to_be_bytes()));
    option
}

fn more(segment: &Seg, numbers: u32) -> Seg {
    Seg { sequence: segment.sequence.wrapping_add(numbers), ..segment.clone() }
}

#[test]
fn an_ack_carries_the_header_again_and_again_until_the_backend_has_it() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.open(&[]);
        let ack = bridge.of_client(ACK, 0, 0);
        for _ in 0..3 {
            assert_eq!(bridge.client_sends(&ack).only_to_backend(), [bridge.header_alone(0, &[])], "{kind:?}");
        }
        assert_eq!(bridge.headers(), [1, 2, 0]);
        let taken = bridge.of_backend(ACK, 0, bridge.h());
        let seen = bridge.backend_sends(&taken).one_to_client();
        assert_eq!(seen, bridge.outside_of(Seg { acknowledgement: bridge.first(), ..taken }), "{kind:?}");
        assert_eq!(bridge.client_sends(&ack).only_to_backend(), [bridge.inside_of(more(&ack, bridge.h()))], "{kind:?}");
        assert_eq!(bridge.headers(), [1, 2, 0]);
    }
}

#[test]
fn the_header_is_in_front_of_the_first_data_whatever_options_there_are() {
    for kind in Kind::all() {
        for options in [vec![], vec![1; 4], stamps(77, 88), [stamps(77, 88), vec![1; 28]].concat()] {
            for flags in [ACK, ACK | PSH, ACK | FIN] {
                let mut bridge = Bridge::new(kind);
                bridge.open(&[]);
                let data = bridge.of_client(flags, 0, 0).with_options(&options).with_data(b"GET / HTTP/1.0\r\n\r\n!");
                let all = [bridge.header.clone(), data.data.clone()].concat();
                let expected = bridge.inside_of(Seg { flags: flags | PSH, ..data.clone() }.with_data(&all));
                assert_eq!(bridge.client_sends(&data).only_to_backend(), [expected], "{kind:?}, {flags:#x}, {options:?}");
            }
        }
    }
}

#[test]
fn data_that_leaves_no_room_follows_the_header() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.open(&[]);
        let options = stamps(77, 88);
        let network_len = if kind.family == Family::V4 { 20 } else { 40 };
        let full = vec![b'x'; 1500 - network_len - 32];
        let data = bridge.of_client(ACK, 0, 0).with_options(&options).with_data(&full);
        let seen = bridge.client_sends(&data).only_to_backend();
        assert_eq!(seen, [bridge.header_alone(0, &options), bridge.inside_of(more(&data, bridge.h()))], "{kind:?}");
        // With as much room as the header needs, it is one packet.
        let fitting = bridge.of_client(ACK | PSH, 0, 0).with_options(&options).with_data(&full[bridge.header.len()..]);
        let all = [bridge.header.clone(), fitting.data.clone()].concat();
        let seen = bridge.client_sends(&fitting).only_to_backend();
        assert_eq!(seen, [bridge.inside_of(fitting.with_data(&all))], "{kind:?}");
        assert_eq!(bridge.headers(), [1, 1, 0]);
    }
}

#[test]
fn what_does_not_begin_the_stream_follows_the_header() {
    for kind in Kind::all() {
        let rows: [(&str, u8, u32, &[u8]); 4] = [
            ("data that overtook the first", ACK, 100, b"later"),
            ("a FIN alone", ACK | FIN, 0, b""),
            ("a keep-alive", ACK, u32::MAX, b""),
            ("a keep-alive with a byte", ACK, u32::MAX, b"x"),
        ];
        for (sentence, flags, sequence, data) in rows {
            let mut bridge = Bridge::new(kind);
            bridge.open(&[]);
            let packet = bridge.of_client(flags, sequence, 0).with_data(data);
            let seen = bridge.client_sends(&packet).only_to_backend();
            let expected = [bridge.header_alone(0, &[]), bridge.inside_of(more(&packet, bridge.h()))];
            assert_eq!(seen, expected, "{kind:?}: {sentence}");
        }
    }
}

#[test]
fn an_acknowledgement_that_lacks_the_header_goes_to_nobody_and_the_header_again_to_the_backend() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.open(&stamps(1, 0));
        bridge.client_sends(&bridge.of_client(ACK, 0, 0).with_options(&stamps(77, 88)).with_window(999));
        let (first, h) = (bridge.first(), bridge.h());
        let blocks = sack(&[[first.wrapping_add(h), first.wrapping_add(h + 18)], [0, 0]]);
        let missing = bridge.of_backend(ACK, 0, 0).with_options(&[stamps(99, 77), blocks].concat());
        let again = bridge.header_alone(0, &stamps(77, 99)).with_window(999);
        let repeats = |bridge: &mut Bridge, ms: u64| {
            bridge.rig.now += ms * MILLISECOND;
            bridge.backend_sends(&missing).only_to_backend()
        };
        assert_eq!(repeats(&mut bridge, 0), std::slice::from_ref(&again), "{kind:?}");
        assert_eq!(repeats(&mut bridge, 5), [], "{kind:?}: not twice in 10 ms");
        assert_eq!(repeats(&mut bridge, 5), [again], "{kind:?}");
        assert_eq!((bridge.drops(DropReason::HeaderAwaited), bridge.headers()), (3, [1, 2, 0]));
    }
}

#[test]
fn data_and_fin_of_a_backend_that_lacks_the_header_reach_the_client_without_hints_at_it() {
    for kind in Kind::all() {
        let rows = [("data", ACK | PSH, &b"220 ready\r\n"[..], 5), ("FIN", ACK | FIN, b"", 5), ("half of it", ACK, b"x", 5)];
        for (sentence, flags, data, acknowledged) in rows {
            let mut bridge = Bridge::new(kind);
            bridge.open(&[3, 3, 2, 0]); // windows in units of 4 bytes
            bridge.client_sends(&bridge.of_client(ACK, 0, 0));
            let blocks = sack(&[[bridge.first().wrapping_add(bridge.h()), bridge.first().wrapping_add(bridge.h() + 9)]]);
            let packet = bridge.of_backend(flags, 0, acknowledged).with_data(data).with_options(&blocks);
            let seen = bridge.backend_sends(&packet).one_to_client();
            let units = u16::try_from((bridge.h() - acknowledged).div_ceil(4)).unwrap();
            let expected = Seg { acknowledgement: bridge.first(), window: 502 - units, ..packet }.with_options(&[1; 12]);
            assert_eq!(seen, bridge.outside_of(expected), "{kind:?}: {sentence}");
        }
    }
}

#[test]
fn acknowledgements_and_blocks_are_those_of_the_clients_stream() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.establish();
        let (first, h) = (bridge.first(), bridge.h());
        let at = |number: u32| first.wrapping_add(number);
        type Row = (&'static str, u32, Vec<[u32; 2]>, u32, Vec<u8>);
        let rows: [Row; 5] = [
            ("a duplicate of the header", h, vec![[at(0), at(h)]], at(0), vec![1; 12]),
            ("a duplicate of the header with data", h + 100, vec![[at(0), at(h + 100)]], at(100), sack(&[[at(0), at(100)]])),
            ("a gap", h + 101, vec![[at(h + 172), at(h + 272)]], at(101), sack(&[[at(172), at(272)]])),
            (
                "a duplicate of half of the header and two gaps",
                h + 101,
                vec![[at(3), at(9)], [at(h + 172), at(h + 272)], [at(h + 400), at(h + 500)]],
                at(101),
                {
                    let mut option = sack(&[[at(172), at(272)], [at(400), at(500)]]);
                    option.extend([1; 8]);
                    option
                },
            ),
            ("an acknowledgement that came late", h / 2, vec![], at(0), vec![]),
        ];
        for (sentence, acknowledged, blocks, acknowledgement, options) in rows {
            let option = if blocks.is_empty() { Vec::new() } else { sack(&blocks) };
            let packet = bridge.of_backend(ACK, 9, acknowledged).with_options(&option);
            let mut seen = bridge.backend_sends(&packet).one_to_client();
            if acknowledged < h {
                seen.window = packet.window; // the right edge stays, which is told elsewhere
            }
            let expected = Seg { acknowledgement, options, ..packet };
            assert_eq!(seen, bridge.outside_of(expected), "{kind:?}: {sentence}");
        }
    }
}

#[test]
fn a_rst_follows_the_header_or_goes_both_ways() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.open(&[]);
        let refused = bridge.of_client(RST, 0, 0);
        assert_eq!(bridge.client_sends(&refused).only_to_backend(), [bridge.inside_of(refused)], "{kind:?}: owed");

        let mut bridge = Bridge::new(kind);
        bridge.open(&[]);
        bridge.client_sends(&bridge.of_client(ACK, 0, 0));
        let reset = bridge.of_client(RST | ACK, 0, 0);
        let expected = [bridge.header_alone(0, &[]), bridge.inside_of(more(&reset, bridge.h()))];
        assert_eq!(bridge.client_sends(&reset).only_to_backend(), expected, "{kind:?}: sent");

        let mut bridge = Bridge::new(kind);
        bridge.open(&[]);
        bridge.client_sends(&bridge.of_client(ACK, 0, 0));
        let bare = bridge.of_client(RST, 0, 0).with_window(0);
        let expected = [bridge.inside_of(bare.clone()), bridge.inside_of(more(&bare, bridge.h()))];
        assert_eq!(bridge.client_sends(&bare).only_to_backend(), expected, "{kind:?}: without ACK");

        let mut bridge = Bridge::new(kind);
        bridge.establish();
        let late = bridge.of_client(RST, 5, 0);
        let expected = bridge.inside_of(more(&late, bridge.h()));
        assert_eq!(bridge.client_sends(&late).only_to_backend(), [expected], "{kind:?}: taken");
    }
}

#[test]
fn a_syn_loses_the_options_and_the_data_that_have_no_place() {
    let fast_open = [34, 10, 1, 2, 3, 4, 5, 6, 7, 8, 1, 1];
    let multipath = [30, 4, 0x10, 1];
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        let known = [2, 4, 5, 0xb4, 4, 2, 1, 1];
        let options = [&known[..], &fast_open, &multipath].concat();
        let syn = bridge.of_client(SYN, u32::MAX, 0).with_options(&options).with_data(b"GET / HTTP/1.0\r\n\r\n__");
        let seen = bridge.client_sends(&syn).only_to_backend();
        let expected = syn.with_options(&[&known[..], &[1; 16]].concat()).with_data(b"");
        assert_eq!(seen, [bridge.inside_of(expected)], "{kind:?}");
    }
}

#[test]
fn urgent_data_stays_the_same_byte() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.open(&[]);
        let urgent = Seg { urgent: 3, ..bridge.of_client(ACK | URG, 0, 0).with_data(b"abc") };
        let seen = bridge.client_sends(&urgent).only_to_backend();
        assert_eq!(usize::from(seen[0].urgent), 3 + bridge.header.len(), "{kind:?}");
        let taken = bridge.of_backend(ACK, 0, bridge.h() + 3);
        bridge.backend_sends(&taken);
        let urgent = Seg { urgent: 2, ..bridge.of_client(ACK | URG, 3, 0).with_data(b"de") };
        assert_eq!(bridge.client_sends(&urgent).only_to_backend(), [bridge.inside_of(more(&urgent, bridge.h()))]);
    }
}

#[test]
fn a_header_of_the_clients_is_data() {
    let mut bridge = Bridge::new(Kind::V2);
    bridge.open(&[]);
    let own = bridge.header.clone();
    let packet = bridge.of_client(ACK | PSH, 0, 0).with_data(&own);
    assert_eq!(bridge.client_sends(&packet).only_to_backend()[0].data, [own.clone(), own].concat());
}

#[test]
fn both_fins_close_the_flow_as_without_a_header() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.establish();
        let fin = bridge.of_client(ACK | FIN, 0, 0);
        assert_eq!(bridge.client_sends(&fin).only_to_backend(), [bridge.inside_of(more(&fin, bridge.h()))]);
        let answer = bridge.of_backend(ACK | FIN, 0, bridge.h() + 1);
        let seen = bridge.backend_sends(&answer).one_to_client();
        assert_eq!(seen.acknowledgement, bridge.first().wrapping_add(1));
        // 10 s: both have closed, by numbers of one stream.
        bridge.rig.now += 11_000 * MILLISECOND;
        let late = bridge.of_client(ACK, 1, 1).packet().build();
        assert_eq!(bridge.rig.put(UPLINK, &late), Some(PacketOutcome::Drop(DropReason::NoFlow)), "{kind:?}");
        bridge.rig.sent(UPLINK);
        bridge.rig.sent(CLUSTER);
        assert_eq!(bridge.headers()[2], 0, "{kind:?}: the client closed first");
    }
}

#[test]
fn a_backend_that_ends_the_connection_before_it_answers_is_counted_once() {
    for flags in [ACK | FIN, RST, RST | ACK] {
        let mut bridge = Bridge::new(Kind::V2);
        bridge.establish();
        for _ in 0..2 {
            bridge.backend_sends(&bridge.of_backend(flags, 0, bridge.h()));
        }
        assert_eq!(bridge.headers(), [1, 0, 1], "{flags:#x}");
    }
    let mut bridge = Bridge::new(Kind::V2);
    bridge.establish();
    bridge.backend_sends(&bridge.of_backend(ACK | PSH, 0, bridge.h()).with_data(b"x"));
    bridge.backend_sends(&bridge.of_backend(RST, 1, 0));
    assert_eq!(bridge.headers(), [1, 0, 0]);
    let mut bridge = Bridge::new(Kind::V2);
    bridge.client_sends(&bridge.of_client(SYN, u32::MAX, 0));
    bridge.backend_sends(&bridge.of_backend(RST | ACK, u32::MAX, 0));
    assert_eq!(bridge.headers(), [0, 0, 0], "the port is closed");
}

#[test]
fn what_nobody_can_shift_ends_by_rst() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        let late = bridge.of_client(ACK, 0, 0);
        let sent = bridge.client_sends(&late);
        assert_eq!((sent.to_backend.len(), Seg::of(&sent.to_client[0]).flags), (0, RST), "{kind:?}: of the client");
        // The backend's packets go to the client or to the gateway.
        let backend: SocketAddr = if kind.family == Family::V4 { "10.0.0.11:8080" } else { "[fd00::11]:8080" }.parse().unwrap();
        let snat: SocketAddr = if kind.family == Family::V4 { "10.0.0.3:2000" } else { "[fd00::3]:2000" }.parse().unwrap();
        bridge.inside = Some((if kind.mode == Mode::Dnat { bridge.client } else { snat }, backend));
        let sent = bridge.backend_sends(&bridge.of_backend(ACK, 0, 0));
        assert_eq!((sent.to_client.len(), Seg::of(&sent.to_backend[0]).flags), (0, RST), "{kind:?}: of the backend");
    }
}

#[test]
fn a_reset_of_the_gateway_has_the_numbers_of_its_receiver() {
    for is_of_client in [true, false] {
        let mut bridge = Bridge::new(Kind::V2);
        bridge.establish();
        bridge.rig.keep_backends("web", &[]);
        let (of_client, of_backend) = (bridge.of_client(ACK, 100, 50), bridge.of_backend(ACK, 50, bridge.h() + 100));
        // The drain ends after 5 minutes; until then the connection goes on.
        bridge.rig.now += 298_000 * MILLISECOND;
        assert_eq!(bridge.client_sends(&of_client).only_to_backend().len(), 1);
        bridge.rig.now += 3_000 * MILLISECOND;
        bridge.rig.publish();
        let sent = if is_of_client { bridge.client_sends(&of_client) } else { bridge.backend_sends(&of_backend) };
        let [to_backend, to_client] = [&sent.to_backend, &sent.to_client].map(|frames| Seg::of(&frames[0]));
        assert_eq!((to_backend.flags & RST, to_client.flags & RST), (RST, RST), "{is_of_client}");
        let next = [bridge.first() + 100 + bridge.h(), SERVER + 1 + 50];
        assert_eq!([to_backend.sequence, to_client.sequence], next, "{is_of_client}");
        let heard = if is_of_client { to_backend.acknowledgement } else { to_client.acknowledgement };
        let expected = if is_of_client { SERVER + 1 + 50 } else { bridge.first() + 100 };
        assert_eq!(heard, expected, "{is_of_client}");
    }
}

/// Ends the only flow on request; returns the probes that leave.
fn end(bridge: &mut Bridge) -> Sent {
    let answer = bridge.rig.ask(match bridge.kind.family {
        Family::V4 => Inquired::V4(FamilyInquiry::new(About::Flows { from: 0 })),
        Family::V6 => Inquired::V6(FamilyInquiry::new(About::Flows { from: 0 })),
    });
    let now = Tick::at(answer.now_ns);
    let view = match &answer.inquired {
        Inquired::V4(of) => FlowView::of(&of.flows[0], now),
        Inquired::V6(of) => FlowView::of(&of.flows[0], now),
        _ => panic!("an answer to another question"),
    };
    let FlowView { protocol, client, frontend, backend, .. } = view;
    let flows = [EndedFlow { protocol, client, frontend, backend }].into_iter().collect();
    let answer = bridge.rig.ask(Inquired::End(FlowEnds { flows, ended: 0 }));
    let Inquired::End(ends) = &answer.inquired else { panic!("an answer to another question") };
    assert_eq!(ends.ended, 1);
    Sent { to_backend: bridge.rig.sent(CLUSTER), to_client: bridge.rig.sent(UPLINK) }
}

#[test]
fn ends_on_request_have_the_numbers_of_their_receivers() {
    for kind in Kind::all() {
        for (is_taken, is_of_client) in [(true, true), (true, false), (false, false)] {
            let case = format!("{kind:?}: taken {is_taken}, of the client {is_of_client}");
            let mut bridge = Bridge::new(kind);
            if is_taken {
                bridge.establish();
            } else {
                bridge.open(&[]);
                bridge.client_sends(&bridge.of_client(ACK, 0, 0));
            }
            let probes = end(&mut bridge);
            assert_eq!([probes.to_backend, probes.to_client].map(|frames| Seg::of(&frames[0]).flags), [ACK, ACK], "{case}");
            // The answer of one end says its numbers; a backend without the header expects its first byte.
            let (n, h) = if is_taken { (100, bridge.h()) } else { (0, 0) };
            let sent = match is_of_client {
                true => bridge.client_sends(&bridge.of_client(ACK, n, 50)),
                false => bridge.backend_sends(&bridge.of_backend(ACK, 50, h + n)),
            };
            assert_eq!([sent.to_backend.len(), sent.to_client.len()], [1, 1], "{case}");
            let [to_backend, to_client] = [&sent.to_backend, &sent.to_client].map(|frames| Seg::of(&frames[0]));
            assert_eq!([to_backend.flags & RST, to_client.flags & RST], [RST, RST], "{case}");
            let next = [bridge.first().wrapping_add(n + h), SERVER + 1 + 50];
            assert_eq!([to_backend.sequence, to_client.sequence], next, "{case}");
            assert_eq!((bridge.headers(), bridge.drops(DropReason::HeaderAwaited)), ([1, 0, 0], 0), "{case}");
        }
    }
}

#[test]
fn segment_sizes_are_clamped_as_ever() {
    let mut bridge = Bridge::new(Kind::V2);
    let syn = Packet::between(bridge.client.ip(), bridge.vip.ip(), {
        let ports = [bridge.client.port(), bridge.vip.port()];
        dataplane::testing::Segment::Tcp { ports, flags: SYN, sequence: 1, acknowledgement: 0 }
    });
    let sent = bridge.put(UPLINK, &with_segment_size(&syn, 1460));
    assert_checksums(&sent.to_backend[0]);
    assert_eq!(dataplane::testing::segment_size(&sent.to_backend[0]), Some(1460));
}

#[test]
fn each_datagram_has_a_header_of_its_own_and_answers_have_none() {
    for family in [Family::V4, Family::V6] {
        for mode in [Mode::Nat, Mode::Dnat] {
            let mut bridge = Bridge::new(Kind { family, mode, ..Kind::V2 });
            let dns = if family == Family::V4 { "192.0.2.101:53" } else { "[2001:db8::1:1]:53" };
            let vip: SocketAddr = dns.parse().unwrap();
            let expected = header(ProxyProtocol::V2, bridge.client, vip, false);
            let question = Packet::udp(&bridge.client.to_string(), dns);
            for data in [&b"one"[..], b"", b"three!"] {
                let sent = bridge.put(UPLINK, &question.clone().payload(data).build());
                assert_checksums(&sent.to_backend[0]);
                let at = if family == Family::V4 { 42 } else { 62 };
                assert_eq!(sent.to_backend[0][at..], [&expected[..], data].concat(), "{family} {mode:?}");
                let (source, backend) = crate::rig::ends(&sent.to_backend[0]);
                let answer = Packet::udp(&backend.to_string(), &source.to_string()).payload(b"answer").build();
                let sent = bridge.put(CLUSTER, &answer);
                assert_eq!(sent.to_client[0][at..], b"answer"[..]);
            }
            assert_eq!(bridge.headers(), [3, 0, 0]);
        }
    }
}

#[test]
fn a_datagram_that_does_not_fit_with_its_header_is_refused_or_fragmented() {
    let mut bridge = Bridge::new(Kind::V2);
    let mut question = Packet::udp(&bridge.client.to_string(), "192.0.2.101:53").payload(&[b'x'; 1500 - 28 - 27]);
    let sent = bridge.put(UPLINK, &question.build());
    assert_eq!((sent.to_backend.len(), &sent.to_client[0][34..36]), (0, &[3, 4][..]), "fragmentation needed");
    assert_eq!(sent.to_client[0][40..42], (1500 - 28_u16).to_be_bytes(), "as much as fits behind the header");
    question.fragmentation = 0;
    let sent = bridge.put(UPLINK, &question.build());
    let whole = dataplane::testing::reassembled(&sent.to_backend);
    assert_checksums(&whole);
    let expected = header(ProxyProtocol::V2, bridge.client, "192.0.2.101:53".parse().unwrap(), false);
    assert_eq!((sent.to_backend.len(), &whole[42..70], whole.len()), (2, &expected[..], 14 + 1501));
    let fits = question.payload(&[b'x'; 1500 - 28 - 28]);
    assert_eq!(bridge.put(UPLINK, &fits.build()).to_backend.len(), 1);
}

#[test]
fn no_path_over_ipv6_is_said_to_be_smaller_than_ipv6_allows() {
    let kind = Kind { family: Family::V6, ..Kind::V2 };
    let config = crate::rig::config(1024);
    let ports = config.ports.iter().map(|port| PortConfig { mtu: 1300, ..port.clone() }).collect();
    let mut rig = Rig::with_config(Config { ports, ..config });
    (rig.state, rig.network) = (crate::rig::state(), crate::rig::network());
    set_proxy_protocol(&mut rig, kind);
    let mut bridge = Bridge::with_rig(rig, kind);
    let question = Packet::udp(&bridge.client.to_string(), "[2001:db8::1:1]:53").payload(&[b'x'; 1260 - 48]);
    let sent = bridge.put(UPLINK, &question.build());
    assert_eq!((sent.to_backend.len(), sent.to_client[0][54]), (0, 2), "packet too big");
    assert_eq!(sent.to_client[0][58..62], 1280_u32.to_be_bytes(), "RFC 8200 section 5");
}

#[test]
fn fragments_of_what_the_gateway_changes_are_dropped() {
    let mut bridge = Bridge::new(Kind::V2);
    bridge.establish();
    let data = bridge.of_client(ACK, 0, 0).with_data(&[b'x'; 600]);
    let mut packet = data.packet();
    packet.fragmentation = 0;
    for piece in dataplane::testing::fragments(&packet.build(), 256, 9) {
        assert_eq!(bridge.put(UPLINK, &piece).to_backend.len(), 0);
    }
    let mut question = Packet::udp(&bridge.client.to_string(), "192.0.2.101:53").payload(&[b'x'; 600]);
    question.fragmentation = 0;
    for piece in dataplane::testing::fragments(&question.build(), 256, 10) {
        assert_eq!(bridge.put(UPLINK, &piece).to_backend.len(), 0);
    }
    assert_eq!(bridge.drops(DropReason::FragmentUnsupported), 6);
}

#[test]
fn a_syn_ack_with_a_small_window_keeps_it() {
    let mut bridge = Bridge::new(Kind::V2);
    bridge.client_sends(&bridge.of_client(SYN, u32::MAX, 0));
    let answer = bridge.of_backend(SYN | ACK, u32::MAX, 0).with_window(20);
    assert_eq!(bridge.backend_sends(&answer).one_to_client().window, 20);
    assert_eq!(answer.sequence, SERVER);
}

#[test]
fn bytes_behind_a_datagram_stay_behind_it() {
    let mut bridge = Bridge::new(Kind::V2);
    let mut datagram = vec![0x15, 0xb3, 0, 53, 0, 8 + 3, 0, 0];
    datagram.extend(b"onejunk");
    let (from, to) = (bridge.client.ip(), "192.0.2.101".parse().unwrap());
    let segment = dataplane::testing::Segment::Other { protocol: 17 };
    let sent = bridge.put(UPLINK, &Packet::between(from, to, segment).payload(&datagram).build());
    let frame = &sent.to_backend[0];
    assert_eq!((&frame[38..42], &frame[70..]), (&[0, 8 + 28 + 3, 0, 0][..], &b"onejunk"[..]));
}

#[test]
fn a_syn_that_comes_late_begins_no_flow_without_a_header() {
    for kind in Kind::all() {
        let mut bridge = Bridge::new(kind);
        bridge.establish();
        let fin = bridge.of_backend(ACK | FIN, 0, bridge.h());
        bridge.backend_sends(&fin);
        let syn = Seg { acknowledgement: 0, ..bridge.of_client(SYN, u32::MAX, 0) };
        assert_eq!(bridge.client_sends(&syn).only_to_backend(), [bridge.inside_of(syn)], "{kind:?}");
        let data = bridge.of_client(ACK | PSH, 0, 1).with_data(b"data");
        let expected = bridge.inside_of(more(&data, bridge.h()));
        assert_eq!(bridge.client_sends(&data).only_to_backend(), [expected], "{kind:?}");
        // Another connection from the same port has a header of its own.
        let next = Seg { acknowledgement: 0, ..bridge.of_client(SYN, 0x7000_0000, 0) };
        bridge.client_sends(&next);
        assert_eq!(bridge.rig.counters.new_flows.get(), 2, "{kind:?}");
    }
}
