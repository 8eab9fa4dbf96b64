# Puts a router between the client and the gateway. Sourced after demo/network.sh.
#
#   client 198.51.100.10 -- router 192.0.2.1 -- uplink [ gateway ]

make_router() { # MTU of the link between client and router
  in_ns client ip link del eth0
  ip netns add "$id-router"
  in_ns router ip link set lo up
  in_ns router sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv6.conf.default.accept_dad=0
  cable client eth0 router inside
  cable router outside gw uplink0
  in_ns client ip link set eth0 mtu "$1"
  in_ns router ip link set inside mtu "$1"
  in_ns client ip addr add 198.51.100.10/24 dev eth0
  in_ns client ip -6 addr add 2001:db8:7::10/64 dev eth0 nodad
  in_ns router ip addr add 198.51.100.1/24 dev inside
  in_ns router ip -6 addr add 2001:db8:7::1/64 dev inside nodad
  in_ns router ip addr add 192.0.2.1/24 dev outside
  in_ns router ip -6 addr add 2001:db8::1/64 dev outside nodad
  in_ns client ip route add default via 198.51.100.1
  in_ns client ip -6 route add default via 2001:db8:7::1
}

# Adds the gateway's route to the client, once its twin exists.
route_to_router() { # address of the router, IPv4 and IPv6
  in_ns gw ip route replace 198.51.100.0/24 via "$1" dev uplink
  in_ns gw ip -6 route replace 2001:db8:7::/64 via "$2" dev uplink
}
