# Additions to the demo's network for one-way modes: a direct link from each backend to the client, a route to the
# gateway's address on the client side (the source of its probes), and the VIPs on the backends' loopback. Sourced after
# demo/network.sh.
#
#   b11 direct0 -- client d11, and so on

client4=192.0.2.10
client6=2001:db8::10

make_direct() { # VIPs...
  # Linux sends probes by another port than the one on which the answers of the backends arrive.
  in_ns gw sysctl -qw net.ipv4.conf.all.rp_filter=1
  local n
  for n in "${backends[@]}"; do
    cable "b$n" direct0 client "d$n"
    local mac; mac=$(in_ns client cat "/sys/class/net/d$n/address")
    in_ns "b$n" ip route replace "$client4/32" dev direct0
    in_ns "b$n" ip neigh replace "$client4" lladdr "$mac" nud permanent dev direct0
    in_ns "b$n" ip -6 route replace "$client6/128" dev direct0
    in_ns "b$n" ip -6 neigh replace "$client6" lladdr "$mac" nud permanent dev direct0
    in_ns "b$n" ip route replace 192.0.2.2/32 via 10.0.0.2
    in_ns "b$n" ip -6 route replace 2001:db8::2/128 via fd00::2
    in_ns "b$n" sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.eth0.rp_filter=0
    take_vips "$n" "$@"
  done
  in_ns client sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0
  for n in "${backends[@]}"; do in_ns client sysctl -qw "net.ipv4.conf.d$n.rp_filter=0"; done
}

# Adds the VIPs to a backend's loopback.
take_vips() { # backend VIPs...
  local n=$1 vip
  for vip in "${@:2}"; do
    case $vip in
      *:*) in_ns "b$n" ip -6 addr add "$vip/128" dev lo nodad ;;
      *) in_ns "b$n" ip addr add "$vip/32" dev lo ;;
    esac
  done
}

# Removes the VIPs from a backend's loopback.
leave_vips() { # backend VIPs...
  local n=$1 vip
  for vip in "${@:2}"; do in_ns "b$n" ip addr del "$vip" dev lo; done
}

# Creates the TUN device of a backend's tunnel end. The caller starts the end.
make_tunnel_device() { # backend
  in_ns "b$1" ip tuntap add dev tunnel0 mode tun
  in_ns "b$1" ip link set tunnel0 up
  in_ns "b$1" sysctl -qw net.ipv4.conf.tunnel0.rp_filter=0
}
