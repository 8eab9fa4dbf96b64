# A second gateway on the same cluster, and a router that spreads flows over both by ECMP. Sourced after
# demo/network.sh and router.sh.
#
#                                     /-- outside  192.0.2.1 -- 192.0.2.2 uplink [ gw ]  cluster 10.0.0.2 --\
#   client 198.51.100.10 -- router --<                                                                     >-- bridge
#                                     \-- outside2 192.0.3.1 -- 192.0.3.2 uplink [ gw2 ] cluster 10.0.0.4 --/
#                                      \- beside2  10.9.0.1 -- 10.9.0.2 beside, for BGP

make_second_gateway() {
  ip netns add "$id-gw2"
  in_ns gw2 ip link set lo up
  in_ns gw2 sysctl -qw net.ipv6.conf.default.accept_dad=0
  cable router outside2 gw2 uplink0
  in_ns router ip addr add 192.0.3.1/24 dev outside2
  in_ns router ip -6 addr add 2001:db8:3::1/64 dev outside2 nodad
  # Flows, not clients, are spread.
  in_ns router sysctl -qw net.ipv4.fib_multipath_hash_policy=1
  cable router beside2 gw2 beside
  in_ns router ip addr add 10.9.0.1/24 dev beside2
  in_ns gw2 ip addr add 10.9.0.2/24 dev beside
  cable gw2 cluster0 sw gw2
  in_ns sw ip link set gw2 master bridge
}

# The router's BIRD: ECMP, and less preference for routes with GRACEFUL_SHUTDOWN (RFC 8326).
write_router_configuration() { # file
  cat >"$1" <<'CONF'
router id 192.0.2.1;
protocol device { }
protocol kernel { merge paths on; ipv4 { import none; export all; }; }
filter from_gateway { if (65535, 0) ~ bgp_community then bgp_local_pref = 0; accept; }
protocol bfd { interface "*" { min rx interval 1000 ms; min tx interval 1000 ms; multiplier 5; }; }
protocol bgp gateway1 {
  local as 64513; neighbor 192.0.2.2 as 64512;
  bfd on; error wait time 1, 5; connect delay time 1;
  ipv4 { import filter from_gateway; export none; };
}
protocol bgp gateway2 {
  local as 64513; neighbor 10.9.0.2 as 64512;
  ipv4 { import filter from_gateway; export none; };
}
CONF
}

# FRR as the same router. It honours GRACEFUL_SHUTDOWN by itself. Of the intervals of BFD, the gateway's are the longer.
write_frr_router_configuration() { # file
  cat >"$1" <<'CONF'
router bgp 64513
 bgp router-id 192.0.2.1
 no bgp ebgp-requires-policy
 neighbor 192.0.2.2 remote-as 64512
 neighbor 192.0.2.2 timers connect 2
 neighbor 192.0.2.2 bfd
 neighbor 10.9.0.2 remote-as 64512
 neighbor 10.9.0.2 timers connect 2
 address-family ipv4 unicast
  maximum-paths 4
 exit-address-family
exit
CONF
}
